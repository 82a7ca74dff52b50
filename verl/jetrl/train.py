"""Runs one arm of a recipe: ``python -m verl.jetrl.train RECIPE_DIR ARM RUN_DIR [hydra overrides]``.

:mod:`verl.jetrl.run` starts this for every arm, watches it and cleans up after it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from pprint import pformat

import ray
from omegaconf import DictConfig, OmegaConf
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from verl.jetrl import patching
from verl.jetrl.compose import RecipeError, compose


@ray.remote
class JetRLTaskRunner:
    """Holds the trainer in a Ray actor, as verl's task runner does."""

    def run(self, config: DictConfig) -> None:
        import transfer_queue as tq
        from verl.utils.logging_utils import configure_verl_logging

        from verl.jetrl.rollout.agent_loop import SeededAgentLoopManager
        from verl.jetrl.trainer.ppo import JetRLTrainer

        patching.require_active("verl")
        configure_verl_logging()
        config.transfer_queue.enable = True
        OmegaConf.resolve(config)
        tq.init(config.transfer_queue)
        try:
            trainer = JetRLTrainer(config)
            trainer.init()
            agent_loop = SeededAgentLoopManager.create(
                config=config,
                llm_client=trainer.get_llm_client(),
                teacher_client=trainer.get_teacher_client(),
                reward_loop_worker_handles=trainer.get_reward_handles(),
            )
            trainer.fit(agent_loop)
        finally:
            tq.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m verl.jetrl.train", description=__doc__.splitlines()[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("arm")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, as for verl: trainer.total_training_steps=5")
    args = parser.parse_args(argv)

    patching.require_active("verl")
    try:
        config = compose(args.recipe, args.arm, args.run_dir, args.overrides)
    except RecipeError as error:
        print(f"RecipeError: {error}", file=sys.stderr)  # so written, verl.jetrl.run finds it in the log
        return 2
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    print(pformat(OmegaConf.to_container(config.jetrl)), flush=True)
    run_ppo(config, JetRLTaskRunner)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    sys.exit(main())
