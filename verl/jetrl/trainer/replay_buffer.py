"""verl's replay buffer, polled faster, that looks after the rollout while it waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

# verl polls every 2 s, which is longer than a small model generates.
POLL_INTERVAL_S = 0.05
WATCH_INTERVAL_S = 5.0


class WatchedReplayBuffer(ReplayBuffer):
    """``watch`` is called every few seconds of waiting; what it raises ends the wait (and the run)."""

    watch: Callable[[], None] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.poll_interval = POLL_INTERVAL_S
        self._watched_at = time.monotonic()

    def _sync_metadata_from_transfer_queue(self) -> Any:
        if self.watch is not None and time.monotonic() - self._watched_at > WATCH_INTERVAL_S:
            self._watched_at = time.monotonic()
            self.watch()
        return super()._sync_metadata_from_transfer_queue()

    def _select_prompt_uids(self, partition_id: str, sampleable_keys: Any, batch_size: int) -> tuple:
        uids, *rest = super()._select_prompt_uids(partition_id, sampleable_keys, batch_size)
        # The order in which responses arrive must not decide the order of the batch.
        return (sorted(uids, key=prompt_position), *rest)


def prompt_position(uid: str) -> tuple[int, int] | tuple[str]:
    """(step, prompt) of a training prompt's id ``s<step>p<prompt>``; other ids (validation) sort as they are."""
    step, _, prompt = uid.removeprefix("s").partition("p")
    return (int(step), int(prompt)) if uid.startswith("s") and step.isdigit() and prompt.isdigit() else (uid,)
