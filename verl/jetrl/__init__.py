"""Jet-RL: on-policy FP8 reinforcement learning on verl and vLLM."""
