"""Names of the metrics of a run: the trainer writes them, the report reads them.

Each record of a run's JSONL file is ``{"step": int, "data": {name: number}}``. Unless said otherwise a value is the
mean over the valid (not masked) response tokens of the step's batch. Times are seconds of wall clock.
"""

# Reward of the sampled responses, and the accuracy on the validation prompts.
REWARD = "critic/score/mean"
VALIDATION_PREFIX = "val-core/"  # val-core/<source>/reward/mean@1, val-core/<source>/acc/mean@1, ...
VALIDATION_MARK = "mean@"  # of those, the plain mean over samples (not best@, maj@)

# Rollout against trainer: log p of the sampled tokens as vLLM and as the trainer compute it, same weights.
ABS_DLOGP_MEAN = "mismatch/abs_dlogp_mean"  # mean |log p_rollout - log p_trainer|, nats
ABS_DLOGP_MAX = "mismatch/abs_dlogp_max"  # maximum of the same over the batch, nats
K3_KL = "mismatch/k3_kl"  # mean of exp(d) - d - 1 with d = log p_trainer - log p_rollout, nats
PEARSON = "mismatch/pearson"  # correlation of the two sides' probabilities, -1..1
# What vocabulary ids past the tokenizer, which verl masks in the rollout only, add to it: mean |log(1 - their mass)|.
PADDING_ABS_DLOGP = "mismatch/padding_abs_dlogp"
MISMATCH = (ABS_DLOGP_MEAN, ABS_DLOGP_MAX, K3_KL, PEARSON)

# Fraction (0..1) of tokens whose update PPO's clipping cut off, among tokens of that sign of advantage.
CLIP_FRAC_POS_ADV = "clip/frac_pos_adv"
CLIP_FRAC_NEG_ADV = "clip/frac_neg_adv"
CLIP = (CLIP_FRAC_POS_ADV, CLIP_FRAC_NEG_ADV)

RESPONSE_LENGTH = "response_length/mean"  # tokens
ENTROPY = "actor/entropy"  # nats
GRAD_NORM = "actor/grad_norm"

# One training step. What the four phases leave of the whole step is "other".
TIME_ROLLOUT = "time/rollout_s"
TIME_LOG_PROB = "time/log_prob_s"
TIME_UPDATE = "time/update_s"
TIME_WEIGHT_SYNC = "time/weight_sync_s"
TIME_STEP = "time/step_s"
TIME_PHASES = (TIME_ROLLOUT, TIME_LOG_PROB, TIME_UPDATE, TIME_WEIGHT_SYNC)

TOKENS_PER_S = "perf/tokens_per_s"
PEAK_MEMORY_GB = "perf/peak_memory_gb"

# Arms in the order in which they are shown. The first is the baseline of every ratio.
BASELINE_ARM = "bf16"
ARMS = (BASELINE_ARM, "bf16-train-fp8-rollout", "bf16-train-fp8-rollout-tis", "jetrl")
