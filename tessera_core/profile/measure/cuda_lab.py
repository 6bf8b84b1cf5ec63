"""The clock and the graphs of one open CUDA device: work is recorded once and replayed between two events."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from tessera_core.devices.cuda import Lane

Result = TypeVar("Result")

CALIBRATION = (8, 16, 32, 64, 128)
"""Launches in the graphs that tell what replaying a graph costs beside its launches."""
CALIBRATION_ROUNDS = 15
FLUSH_L2_MULTIPLE = 4
"""Bytes read to empty the L2 cache, in sizes of the cache: its replacement is not least-recently-used."""
SPACER_CYCLES = 400_000
"""About 0.2 ms in which the host gets ahead of the device, so that no launch is waited for while timing."""


class Replay(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Enqueue it once more."""


class Lab(Protocol):
    """What sampling needs of a device. Work is enqueued in order; nothing waits before :meth:`settle`."""

    @property
    def device(self) -> str:
        """For tensors."""

    @property
    def cache_bytes(self) -> int:
        """Size of the L2 cache."""

    @property
    def fixed_us(self) -> float:
        """What replaying a graph takes on the device beside its launches."""

    def run(self, work: Callable[[], Result]) -> Result:
        """Do ``work`` now, in order with everything else here."""

    def record(self, work: Callable[[], object]) -> Replay:
        """Record ``work`` without doing it."""

    def launch(self, replay: Replay) -> None:
        """Enqueue recorded work."""

    def mark(self) -> Any:
        """Enqueue a timestamp."""

    def after(self, mark: Any) -> None:
        """Let everything enqueued from now on wait for a timestamp of another lab."""

    def passed(self, mark: Any) -> bool:
        """Whether a timestamp was taken already."""

    def space(self) -> None:
        """Keep the device busy while the host gets ahead."""

    def flush(self) -> None:
        """Enqueue a read of more than the L2 cache holds, which leaves nothing else in it."""

    def settle(self) -> None:
        """Wait until everything enqueued here is done."""

    def microseconds(self, begin: Any, end: Any) -> float:
        """Between two timestamps, after :meth:`settle`."""


class CudaLab:
    """A lab on an open GPU or slice."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.device = lane.device.torch_name
        self.cache_bytes = int(torch.cuda.get_device_properties(lane.device.index).L2_cache_size)
        self._pool = torch.cuda.graph_pool_handle()
        self._marks: list[Any] = []
        self._used = 0
        size = FLUSH_L2_MULTIPLE * self.cache_bytes // 4
        self._cover = torch.randn(size, dtype=torch.float32, device=self.device)
        self._sum = torch.empty((), dtype=torch.float32, device=self.device)
        # A pool that no graph holds is gone for good, so one graph lives as long as the lab.
        self.run(self.flush)
        self._anchor = self.record(self.flush)
        self.fixed_us, self.least_us = self._calibrate()

    def run(self, work: Callable[[], Result]) -> Result:
        """Do ``work`` on the device's stream."""
        with torch.no_grad(), torch.cuda.stream(self.lane.stream):
            return work()

    def record(self, work: Callable[[], object]) -> Replay:
        """A CUDA graph of ``work``; all graphs of a lab share their scratch, because they run one after another."""
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()  # what a collection frees meanwhile would be freed inside the capture
        try:
            with torch.no_grad(), torch.cuda.stream(self.lane.stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        return graph

    def launch(self, replay: Replay) -> None:
        """Replay on the device's stream."""
        with torch.cuda.stream(self.lane.stream):
            replay.replay()

    def mark(self) -> Any:
        """An event that times; they are used again after :meth:`settle`."""
        if self._used == len(self._marks):
            self._marks.append(torch.cuda.Event(enable_timing=True))
        event = self._marks[self._used]
        self._used += 1
        event.record(self.lane.stream)
        return event

    def after(self, mark: Any) -> None:
        """Wait on the stream."""
        self.lane.stream.wait_event(mark)

    def passed(self, mark: Any) -> bool:
        """Whether the event is complete."""
        return bool(mark.query())

    def space(self) -> None:
        """Spin on the device."""
        with torch.cuda.stream(self.lane.stream):
            torch.cuda._sleep(SPACER_CYCLES)

    def flush(self) -> None:
        """Sum what covers the cache; reading leaves nothing that would have to be written back later."""
        torch.sum(self._cover, dim=0, out=self._sum)

    def settle(self) -> None:
        """Synchronise with the stream."""
        self.lane.stream.synchronize()
        self._used = 0

    def microseconds(self, begin: Any, end: Any) -> float:
        """Elapsed time of two events."""
        return float(begin.elapsed_time(end)) * 1e3

    def launch_us(self, rounds: int = 200) -> float:
        """Median host time of one graph launch on the idle device: what a segment costs beside its kernels."""
        small = torch.rand(64, device=self.device)
        graph = self.record(lambda: small.add_(1.0))
        found = []
        with torch.cuda.stream(self.lane.stream):
            for _ in range(rounds):
                self.settle()
                start = time.perf_counter()
                graph.replay()
                found.append((time.perf_counter() - start) * 1e6)
        self.settle()
        return statistics.median(found)

    def _calibrate(self) -> tuple[float, float]:
        """Microseconds of replaying a graph beside its launches, and of each of many least launches."""
        small = torch.rand(64, device=self.device)
        self.run(lambda: small.add_(1.0))
        self.lane.stream.synchronize()

        def repeated(count: int) -> Replay:
            def work() -> None:
                for _ in range(count):
                    small.add_(1.0)

            return self.record(work)

        graphs = [repeated(count) for count in CALIBRATION]
        found: list[list[float]] = [[] for _ in graphs]
        for number in range(CALIBRATION_ROUNDS + 1):
            self.space()
            marks = []
            for graph in graphs:
                begin = self.mark()
                self.launch(graph)
                marks.append((begin, self.mark()))
            self.settle()
            for times, (begin, end) in zip(found, marks):
                if number:
                    times.append(self.microseconds(begin, end))
        return fixed_cost(CALIBRATION, [statistics.median(times) for times in found])


def fixed_cost(launches: Sequence[int], times_us: Sequence[float]) -> tuple[float, float]:
    """What is left of a graph's time at no launches, at least 0, and what each launch adds, in microseconds."""
    slope, rest = np.polyfit(np.asarray(launches, dtype=float), np.asarray(times_us, dtype=float), 1)
    return max(0.0, float(rest)), float(slope)
