"""Measuring kernels on CPU workers: one process per CPU, one thread, pinned, replaying whole iterations.

Kernels are timed where they run, between their neighbours, so that caches are as they will be ("sequence").
Under the condition "beside" two workers share one program, as a plan's would: while the measured worker replays one
half of the kernels, a second worker replays the other half on another CPU, and then the halves change places. So each
kernel finds of its half's weights in cache what a pipeline's worker finds, and memory bandwidth and the last cache
are shared. Under "copies" the second worker replays the whole program, as data parallelism does.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from math import comb
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera_core.devices.cpu import CpuDevice, processor_name
from tessera_core.execute.process import child
from tessera_core.profile.times import Condition, TimeRow
from tessera_core.program.ir import Kernel, Trace
from tessera_core.program.store import load_trace
from tessera_formats import errors
from tessera_formats.deps import WHOLE
from tessera_formats.errors import DeviceLostError, TesseraError

ENOUGH_SHARE = 0.1
LEAST_KEPT = 5
"""Disturbed iterations are left out where at least this share of all, and this many, were not disturbed."""

BLOCKS = 20
"""An interval is taken over medians of this many stretches of time, so that it shows slow drift as well."""

CONFIDENCE = 0.9
"""Of the intervals that profiles state."""

LOADS: Mapping[Condition, str] = {
    "beside": "the other half of the kernels",
    "copies": "the whole program",
}
"""What the second worker replays."""

SEED = 20_261_201
"""Of inputs and state; times don't depend on which values they are, as long as they are ordinary."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Rows per signature, and what whole iterations took, by (program id, condition)."""

    rows: tuple[TimeRow, ...]
    whole: Mapping[tuple[int, Condition], WholeTime]


@dataclass(frozen=True, slots=True)
class WholeTime:
    """Median time of the iterations that were kept, and the share of all that other work disturbed.

    Where the kernels' medians add up to much less than ``median_us``, the CPU was not the worker's alone.
    """

    median_us: float
    disturbed: float


@dataclass(frozen=True, slots=True)
class Samples:
    """Nanoseconds of every kernel, shape (iterations, kernels); disturbed iterations are left out or not."""

    times: npt.NDArray[np.int64]
    disturbed: float

    @staticmethod
    def of(times: npt.NDArray[np.int64], disturbed: npt.NDArray[np.bool_]) -> Samples:
        """Keep undisturbed iterations if there are enough of them, else all."""
        share = float(disturbed.mean())
        kept = times[~disturbed]
        enough = len(kept) >= max(LEAST_KEPT, ENOUGH_SHARE * len(times))
        return Samples(kept if enough else times, share)

    @staticmethod
    def joined(parts: Sequence[Samples]) -> Samples:
        """Consecutive parts of a program side by side, as many iterations as the shortest has."""
        count = min(len(part.times) for part in parts)
        times = np.concatenate([_thinned(part.times, count) for part in parts], axis=1)
        return Samples(times, max(part.disturbed for part in parts))

    @property
    def whole(self) -> WholeTime:
        """Of whole iterations."""
        return WholeTime(float(np.median(self.times.sum(axis=1))) / 1e3, self.disturbed)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuMeasurement:
    """Times of every kernel of ``trace`` (read from ``path`` by the workers) on ``cpu``.

    ``beside``: a CPU for a second worker; None leaves the conditions "beside" and "copies" out. ``seconds``: for
    all programs and conditions together, start-up aside.
    """

    trace: Trace
    path: Path
    device_type: str
    cpu: CpuDevice
    beside: CpuDevice | None
    trust: bool
    seconds: float

    def run(self, progress: Callable[[str], None]) -> Measured:
        """Measure; raises what replay raises, and :class:`DeviceLostError` where a worker dies."""
        conditions: tuple[Condition, ...] = ("alone",) if self.beside is None else ("alone", *LOADS)
        share = self.seconds / (len(conditions) * max(1, len(self.trace.programs)))
        found: dict[Condition, dict[int, Samples]] = {condition: {} for condition in conditions}
        with ExitStack() as stack:
            progress(f"{self.device_type}: starting on {self.cpu.name}")
            worker = stack.enter_context(start_worker(self.path, self.cpu, self.trust))
            other = (
                stack.enter_context(start_worker(self.path, self.beside, self.trust)) if self.beside else None
            )
            for program in self.trace.programs:
                progress(f"{self.device_type}: {program.name} alone on {self.cpu.name}")
                alone = Samples.of(
                    *worker.ask("time", program.id, share, whole := range(len(program.kernels)))
                )
                found["alone"][program.id] = alone
                if other is None:
                    continue
                progress(f"{self.device_type}: {program.name} on {self.cpu.name} beside {other.cpu.name}")
                found["copies"][program.id] = _beside(worker, other, program.id, share, whole, whole)
                halves = halves_of(alone)
                parts = [
                    _beside(worker, other, program.id, share / len(halves), own, far)
                    for own, far in zip(halves, reversed(halves), strict=True)
                ]
                found["beside"][program.id] = Samples.joined(parts)
        return Measured(
            tuple(
                row
                for condition, samples in found.items()
                for row in summarise(self.trace, samples, self._place(condition))
            ),
            {
                (program, condition): of_program.whole
                for condition, samples in found.items()
                for program, of_program in samples.items()
            },
        )

    def _place(self, condition: Condition) -> Place:
        return Place(
            device_type=self.device_type,
            condition=condition,
            hardware=f"{processor_name()}, {self.cpu.name}",
            dated=datetime.now(UTC).isoformat(timespec="seconds"),
            load=""
            if self.beside is None or condition == "alone"
            else f"{LOADS[condition]} on {self.beside.name}",
        )


def halves_of(samples: Samples) -> tuple[range, ...]:
    """A program's kernels cut in two where each half takes most nearly the same time; whole if there is but one."""
    ends = np.median(samples.times, axis=0).cumsum()
    if len(ends) < 2:
        return (range(len(ends)),)
    cut = 1 + int(np.argmin(np.abs(ends[:-1] - ends[-1] / 2)))
    return range(cut), range(cut, len(ends))


def _beside(worker: _Worker, other: _Worker, program: int, seconds: float, own: range, far: range) -> Samples:
    """Times of the kernels ``own`` on ``worker`` while ``other`` replays ``far``."""
    other.ask("loop", program, far)
    samples = Samples.of(*worker.ask("time", program, seconds, own))
    other.ask("stop")
    return samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where and when samples were taken, as rows say it (see :class:`~tessera_core.profile.times.TimeRow`)."""

    device_type: str
    condition: Condition
    hardware: str
    dated: str
    load: str = ""


def _thinned(times: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """``count`` iterations spread evenly over all, so that drift shows as it was."""
    return times[np.linspace(0, len(times) - 1, count).astype(np.int64)]


def summarise(trace: Trace, samples: Mapping[int, Samples], place: Place) -> list[TimeRow]:
    """One row per signature from each program's samples."""
    columns: dict[str, list[tuple[int, int]]] = {}
    first: dict[str, Kernel] = {}
    for program in trace.programs:
        for kernel in program.kernels:
            columns.setdefault(kernel.signature, []).append((program.id, kernel.id))
            first.setdefault(kernel.signature, kernel)
    rows = []
    for signature, places in columns.items():
        groups = [
            samples[program].times[:, [kernel for owner, kernel in places if owner == program]] / 1e3
            for program in sorted({owner for owner, _ in places})
        ]
        times = np.concatenate([group.ravel() for group in groups])
        low, high = median_interval(np.concatenate([_block_medians(group) for group in groups]))
        middle = float(np.median(times))
        kernel = first[signature]
        rows.append(
            TimeRow(
                signature=signature,
                part=WHOLE,
                device_type=place.device_type,
                condition=place.condition,
                load=place.load,
                cache="sequence",
                median_us=middle,
                p10_us=float(np.quantile(times, 0.1)),
                p90_us=float(np.quantile(times, 0.9)),
                low_us=min(low, middle),
                high_us=max(high, middle),
                samples=len(times),
                flops=kernel.flops,
                bytes=kernel.read_bytes + kernel.written_bytes,
                dtype=kernel.dtype,
                source="measured",
                hardware=place.hardware,
                dated=place.dated,
                detail=f"{sum(len(group) for group in groups)} iterations, one pinned thread{_noise(samples)}",
            )
        )
    return rows


def _noise(samples: Mapping[int, Samples]) -> str:
    worst = max(item.disturbed for item in samples.values())
    return f", {worst:.0%} disturbed by other work" if worst > 0 else ""


def median_interval(values: npt.NDArray[np.float64], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """An interval of the median from order statistics, which assumes nothing of the distribution.

    The narrowest symmetric pair of ranks that covers the median with ``confidence`` (binomial with 1/2; David
    and Nagaraja, "Order Statistics", section 7.1); the whole range where there are too few values for that.
    """
    ordered, count = np.sort(values), len(values)
    below, outside = 0, 0.0
    while below < (count - 1) // 2:
        outside += 2 * comb(count, below) / 2**count
        if outside > 1 - confidence:
            break
        below += 1
    below = max(0, below - 1)
    return float(ordered[below]), float(ordered[count - 1 - below])


def _block_medians(times: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.array([np.median(block) for block in np.array_split(times, min(BLOCKS, len(times)))])


@dataclass(frozen=True, slots=True)
class _Worker:
    """The near end of a worker process."""

    cpu: CpuDevice
    process: subprocess.Popen[bytes]
    connection: Connection

    def tell(self, *message: Any) -> None:
        """Send without waiting for an answer."""
        try:
            self.connection.send(message)
        except OSError as problem:
            raise self._lost() from problem

    def ask(self, *message: Any) -> Any:
        """Send, and wait for the answer."""
        self.tell(*message)
        return self.answer()

    def answer(self) -> Any:
        """The worker's next answer; its error, if that is what it met."""
        try:
            kind, *content = self.connection.recv()
        except (EOFError, OSError) as problem:
            raise self._lost() from problem
        if kind == "error":
            raise getattr(errors, content[0])(content[1])
        return content[0] if content else None

    def _lost(self) -> DeviceLostError:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1)
        return DeviceLostError(
            f"the worker on {self.cpu.name} was lost while measuring (exit code {self.process.returncode});"
            " nothing was written, run tessera profile again"
        )


@contextmanager
def start_worker(path: Path, cpu: CpuDevice, trust: bool) -> Iterator[_Worker]:
    """A worker that has loaded ``path`` and is pinned to ``cpu``; it is gone when the block ends."""
    with child(_serve, str(path), cpu, trust) as started:
        worker = _Worker(cpu, started.process, started.connection)
        worker.answer()
        yield worker


def _serve(connection: Connection, path: str, cpu: CpuDevice, trust: bool) -> None:
    """A worker's whole life: pin, load, then do as told until it is ended."""
    cpu.pin()
    import torch

    from tessera_core.profile.measure.replay_loop import ReplayLoop

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    try:
        with torch.inference_mode():  # as the executor's workers do
            loop = ReplayLoop(load_trace(path), trust, SEED)
            connection.send(("ready",))
            while True:
                message = connection.recv()
                if message[0] == "time":
                    _, program, seconds, kernels = message
                    connection.send(("samples", loop.samples(program, seconds, kernels)))
                else:
                    _, program, kernels = message
                    connection.send(("looping",))
                    loop.run_until(program, connection.poll, kernels)
                    connection.recv()
                    connection.send(("stopped",))
    except TesseraError as problem:
        connection.send(("error", type(problem).__name__, str(problem)))
