"""Device timing for the benchmarks: CUDA-graph replays for single operators, interleaved rounds for comparisons."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

Run = Callable[[int], object]
"""One call of a workload; the argument counts calls, so that a workload can rotate among input sets."""


class Clock:
    """Times workloads in microseconds on ``device`` and keeps every raw sample under a name."""

    def __init__(self, device: str, quick: bool):
        self.cuda = device == "cuda"
        self.rounds = 2 if quick else 7
        self.samples: dict[str, list[float]] = {}

    def _keep(self, name: str, samples: list[float]) -> float:
        self.samples[name] = [round(x, 3) for x in samples]
        return statistics.median(self.samples[name])

    def _timed(self, work: Callable[[], object]) -> float:
        if not self.cuda:
            start = time.perf_counter()
            work()
            return 1e6 * (time.perf_counter() - start)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return 1e3 * start.elapsed_time(end)

    def graph(self, name: str, run: Run, calls: int = 10) -> float:
        """Median microseconds per call, from replays of a CUDA graph of ``calls`` calls: no host time in between."""
        if not self.cuda:
            run(0)
            return self._keep(name, [self._timed(lambda: run(0)) for _ in range(self.rounds)])
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for i in range(min(calls, 3)):
                run(i)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(calls):
                run(i)
        graph.replay()
        return self._keep(name, [self._timed(graph.replay) / calls for _ in range(self.rounds)])

    def compare(self, runs: dict[str, Run], calls: int = 4) -> dict[str, float]:
        """Median microseconds per eager call of each workload, in interleaved rounds: clocks and heat hit all alike."""
        for run in runs.values():
            run(0)
            run(1)
        if self.cuda:
            torch.cuda.synchronize()
        samples: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(self.rounds):
            for name, run in runs.items():

                def several(run: Run = run) -> None:
                    for i in range(calls):
                        run(i)

                run(0)
                samples[name].append(self._timed(several) / calls)
        return {name: self._keep(name, values) for name, values in samples.items()}
