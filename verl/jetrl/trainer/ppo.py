"""verl's synchronous V1 trainer with the fork's workers, checks and metrics.  All arms run through it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import DictConfig
from verl.protocol import DataProto
from verl.trainer.ppo.v1 import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.workers.rollout.replica import RolloutReplicaRegistry

from verl.jetrl import checkpoints, flow_check, patching, weights
from verl.jetrl import metric_names as names
from verl.jetrl.metrics import mismatch
from verl.jetrl.trainer.worker import JetRLWorker


def _load_replica() -> type:
    from verl.jetrl.rollout.server import JetRLReplica

    return JetRLReplica


class RolloutError(RuntimeError):
    """The rollout failed: requests raised, or weights or versions are not what they must be."""


class JetRLTrainer(PPOTrainerSync):
    """One GRPO run of one arm."""

    def __init__(self, config: DictConfig) -> None:
        patching.require_active("verl")
        super().__init__(config)
        self.replay_buffer.watch = self._watch_rollout
        RolloutReplicaRegistry.register("vllm", _load_replica)
        self._submitted_at = 0.0
        self._updates = 0
        self._prompts: list[int] = []  # indices of the step's prompts in the data set

    # --- set-up ---------------------------------------------------------------------------------------------------

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in self.role_worker_mapping:
            if "actor" in str(role) or "ref" in str(role):
                self.role_worker_mapping[role] = ray.remote(JetRLWorker)

    def on_init_end(self) -> None:
        super().on_init_end()
        for side, patches in (
            ("trainer", self.actor_rollout_wg.jetrl_patches()[0]),
            ("rollout", self._ask_rollout("jetrl_patches")[0]),
        ):
            print(f"patches in the {side}'s worker:", ", ".join(f"{n} {s}" for n, s in patches.items()), flush=True)
        self._first_step = self.global_steps + 1
        self._check_precision_flow()
        self._check_weights()
        self._record_state()

    def _ask_rollout(self, method: str) -> list[Any]:
        """Answers of every vLLM worker of every replica."""
        replicas = self.llm_server_manager.get_replicas()
        answers = ray.get([server.ask_workers.remote(method) for replica in replicas for server in replica.servers])
        return [answer for workers in answers for answer in workers]

    def _check_precision_flow(self) -> None:
        trainer = self.actor_rollout_wg.jetrl_describe_precision()[0]
        rollout = self._ask_rollout("jetrl_describe_precision")[0]
        rows = flow_check.compare(trainer, rollout)
        print("Precision flow\n" + flow_check.table(rows), flush=True)
        flow_check.require_equal(rows, self.config.jetrl.mixed_precision)

    def _check_weights(self) -> None:
        """Every worker of the rollout holds the trainer's weights, or the run stops and names the tensor."""
        mine = self.actor_rollout_wg.jetrl_weight_digests()[0]
        for theirs in self._ask_rollout("jetrl_weight_digests"):
            stock_fp8 = self.config.actor_rollout_ref.rollout.quantization is not None
            different = weights.compare(mine, theirs, quantized_by_rollout=stock_fp8)
            if different:
                raise RolloutError(
                    f"after update {self._updates} (step {self.global_steps}) the rollout's weights are not the "
                    f"trainer's: {len(different)} tensors differ, first {different[0]}. The weight update did not arrive."
                )

    def on_step_end(self) -> None:
        super().on_step_end()
        self._updates += 1
        every = self.config.jetrl.verify_weights_every
        if every and self._updates % every == 0:
            self._check_weights()
        self._record_state()

    def _record_state(self) -> None:
        if not self.config.jetrl.record_state:
            return
        state = {"step": self.global_steps, "prompts": self._prompts, **self.actor_rollout_wg.jetrl_state_digests()[0]}
        with open(Path(self.config.jetrl.run_dir) / "state.jsonl", "a") as file:
            file.write(json.dumps(state) + "\n")

    def _save_checkpoint(self) -> None:
        folder = Path(self.config.trainer.default_local_dir)
        checkpoints.unmark(folder, self.global_steps)
        super()._save_checkpoint()
        checkpoints.mark_complete(folder, self.global_steps)

    # --- rollout --------------------------------------------------------------------------------------------------

    def _next_train_batch(self, num_prompts: int | None = None):
        batch = super()._next_train_batch(num_prompts)
        # verl's random ids order the batch; ids made of step and position make two runs' batches equal.
        self._prompts = [int(index) for index in batch["index"]]
        tu.assign_non_tensor_stack(batch, "uid", [f"s{self.global_steps}p{i}" for i in range(len(batch))])
        return batch

    def _submit_batch_to_rollout(self, batch) -> int:
        self._submitted_at = time.time()
        return super()._submit_batch_to_rollout(batch)

    def _watch_rollout(self) -> None:
        """Called while the trainer waits for responses: a failed request, a dead server or trainer process ends the run."""
        error = self.agent_loop_manager.first_error()
        if error:
            raise RolloutError(f"a request of step {self.global_steps} failed in the rollout: {error}")
        replicas = self.llm_server_manager.get_replicas()
        ray.get([server.check_health.remote() for replica in replicas for server in replica.servers])
        # The trainer's processes idle meanwhile: one that died holds the weights that the engine reads.
        ray.get([worker.__ray_ready__.remote() for worker in self.actor_rollout_wg.workers])

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        """verl calls this to replace failed prompts, and would go on for ever."""
        self._watch_rollout()
        raise RolloutError(f"{num_prompts} prompts of step {self.global_steps} failed in the rollout")

    def _balance_batch(self, batch, metrics, **kwargs):
        self._check_versions(batch)
        return super()._balance_batch(batch, metrics, **kwargs)

    def _check_versions(self, batch) -> None:
        cache = self.config.skip.rollout_tq
        if cache.enable and self.global_steps in cache.steps:
            return  # verl's rollout cache stamps the responses that it replays anew
        expected = self.global_steps - 1
        for key, tag in zip(batch.keys, batch.tags, strict=True):
            if {tag["min_global_steps"], tag["max_global_steps"]} != {expected}:
                raise RolloutError(
                    f"response {key} of step {self.global_steps} was sampled from weight version "
                    f"{tag['min_global_steps']}..{tag['max_global_steps']}, not {expected}"
                )

    # --- metrics --------------------------------------------------------------------------------------------------

    @property
    def _exact(self) -> bool:
        return self.config.actor_rollout_ref.actor.fsdp_config.precision_flow.exact

    def _compute_old_log_prob(self, batch, metrics: dict):
        """verl's pass over the responses; in exact mode only every ``jetrl.verify_log_probs_every`` steps.

        There the rollout's log-probs *are* the trainer's, so the pass has nothing to add; when it runs it must find no
        difference in any token.
        """
        every = self.config.jetrl.verify_log_probs_every
        if self._exact and not (every and (self.global_steps - self._first_step) % every == 0):
            fields = ["rollout_log_probs", "extra_fields"]
            data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
            metrics[names.TIME_ROLLOUT] = self._rollout_seconds(data.pop("extra_fields"))
            data["old_log_probs"] = data.pop("rollout_log_probs")
            return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=data)
        batch = super()._compute_old_log_prob(batch, metrics)
        metrics.update(self._mismatch(batch))
        if self._exact and metrics[names.ABS_DLOGP_MAX] != 0.0:
            raise RolloutError(
                f"exact mode: rollout and trainer differ by up to {metrics[names.ABS_DLOGP_MAX]:.3e} in the log-prob of a "
                f"token of step {self.global_steps}; they must be equal bit for bit. A stale weight, another kernel or "
                "another version on one side does this; precision_flow.exact=false trains with the difference."
            )
        return batch

    def _rollout_seconds(self, extra_fields) -> float:
        # verl's rollout cache (skip.rollout_tq) replays responses that were finished before they were asked for.
        finished = [extra["finished_at"] for extra in extra_fields.tolist()]
        return max(0.0, max(finished) - self._submitted_at)

    def _mismatch(self, batch) -> dict[str, float]:
        fields = ["rollout_log_probs", "old_log_probs", "response_mask", "extra_fields"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        seconds = self._rollout_seconds(data.pop("extra_fields"))
        padded = DataProto(batch=data.to_padded_tensor()).batch
        values = mismatch(padded["rollout_log_probs"], padded["old_log_probs"], padded["response_mask"])
        values[names.TIME_ROLLOUT] = seconds
        values[names.PADDING_ABS_DLOGP] = max(self.actor_rollout_wg.jetrl_padding_abs_dlogp())
        return values

    def _compute_metrics(self, batch, metrics: dict, timing_raw: dict, global_steps: int, epoch: int) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        for name in names.CLIP:
            if f"actor/{name}" in metrics:  # of the loss "vanilla_signed" alone
                metrics[name] = metrics.pop(f"actor/{name}")
        metrics[names.TIME_LOG_PROB] = timing_raw["old_log_prob"]
        metrics[names.TIME_UPDATE] = timing_raw["update_actor"]
        metrics[names.TIME_WEIGHT_SYNC] = timing_raw["update_weights"]
        metrics[names.TIME_STEP] = timing_raw["step"]
        metrics[names.TOKENS_PER_S] = metrics["perf/total_num_tokens"] / timing_raw["step"]
        metrics[names.PEAK_MEMORY_GB] = metrics["actor/perf/max_memory_allocated_gb"]
