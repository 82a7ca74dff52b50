"""verl's replay buffer, polled faster, that looks after the rollout while it waits."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from transfer_queue import KVBatchMeta
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

    def _materialize_batch(self, *args: Any) -> KVBatchMeta:
        batch = super()._materialize_batch(*args)
        # The order in which responses arrive must not decide the order of the batch.
        batch.reorder(sorted(range(len(batch.keys)), key=lambda i: position(batch.keys[i])))
        return batch


def position(key: str) -> tuple[tuple[int, ...], str]:
    """Sorts trajectories ``s<step>p<prompt>_<sample>_<output>`` by these numbers; other keys (validation) by their text."""
    numbers = re.fullmatch(r"s(\d+)p(\d+)_(\d+)_(\d+)", key)
    return (tuple(map(int, numbers.groups())), key) if numbers else ((), key)
