"""Measuring kernels on CUDA devices: every signature compiled as capture compiles it, replayed from a CUDA graph.

Kernels find caches as an iteration leaves them ("sequence"), or hot ("warm"). Under the condition "copies" the other
slice of the same cut runs the whole program meanwhile, as data parallelism does. Whole iterations are timed in the same
rounds, to hold the sum of the kernels against.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import torch

from tessera_core.devices.cuda import CudaDevice, open_lanes, reported_name
from tessera_core.profile.measure.cpu import Place, WholeTime
from tessera_core.profile.measure.cuda_blocks import (
    Block,
    CoRunner,
    free,
    iteration_block,
    kernel_block,
)
from tessera_core.profile.measure.cuda_copies import Copies, Rotation
from tessera_core.profile.measure.cuda_lab import CudaLab, Lab
from tessera_core.profile.measure.cuda_rounds import BlockTimes, sample
from tessera_core.profile.measure.cuda_slices import check_disjoint
from tessera_core.profile.measure.cuda_source import Progress, Source, reason
from tessera_core.profile.times import Condition, TimeRow
from tessera_core.program.ir import Kernel, Program, Trace
from tessera_formats.deps import WHOLE
from tessera_formats.errors import InputError

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaMeasured:
    """Rows per signature, times of whole iterations by (program id, condition), and what could not be measured.

    ``unmeasured``: signature -> why. ``overhead_us``: of a segment. ``hardware``: as the rows say it.
    """

    rows: tuple[TimeRow, ...]
    whole: Mapping[tuple[int, Condition], WholeTime]
    unmeasured: Mapping[str, str]
    overhead_us: float
    hardware: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaMeasurement:
    """Times of every kernel of ``trace`` on ``hardware``.

    ``beside``: another slice of the same cut, which runs the same program meanwhile; None leaves the condition out.
    ``seconds``: of sampling for all programs and conditions together, compiling aside. ``warm``: the same buffers
    for all launches, so that caches are hot. ``path`` is for errors.
    """

    trace: Trace
    path: Path
    device_type: str
    hardware: CudaDevice
    beside: CudaDevice | None = None
    trust: bool = False
    seconds: float = 20.0
    warm: bool = False

    def run(self, progress: Progress) -> CudaMeasured:
        """Measure; raises :class:`InputError` for slices that can't be had, or too little memory."""
        beside = self.beside
        if beside is not None and not self.hardware.is_beside(beside):
            raise InputError(
                f"--beside {beside.name}: is no other slice of {self.hardware.name};"
                " name one that differs only in what follows #"
            )
        with _enough_memory(self.trace, self.path, self.hardware):
            lanes = open_lanes(self.hardware)
            lab = CudaLab(lanes[self.hardware.part])
            other = CudaLab(lanes[beside.part]) if beside is not None else None
            if other is not None:
                check_disjoint((lab, other), self.hardware.name)
            source = Source.of(self.trace, self.hardware.torch_name, self.trust)
            source.compile(lab, lambda text: progress(f"{self.device_type}: {text}"))
            found = measure(
                source,
                lab,
                other,
                seconds=self.seconds,
                rotation="none" if self.warm else "all",
                progress=lambda text: progress(f"{self.device_type}: {text} on {self.hardware.name}"),
            )
            hardware = described(self.hardware)
            load = f"the same program's iterations on {beside.name}" if beside is not None else ""
            return CudaMeasured(
                rows=tuple(rows_of(source, found, self.device_type, hardware, load)),
                whole=found.whole(),
                unmeasured=dict(source.unmeasured),
                overhead_us=lab.launch_us(),
                hardware=hardware,
            )


def described(device: CudaDevice) -> str:
    """A device as rows say it."""
    return f"{reported_name(device.index)}, {device.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Block times by condition and name (signatures, and programs for whole iterations)."""

    trace: Trace
    rotation: Rotation
    times: Mapping[Condition, Mapping[str, BlockTimes]]

    def whole(self) -> dict[tuple[int, Condition], WholeTime]:
        """Times of whole iterations."""
        return {
            (program.id, condition): WholeTime(times[program.name].median_us, 0.0)
            for condition, times in self.times.items()
            for program in self.trace.programs
            if program.name in times
        }

    def total_us(self, program: Program, condition: Condition) -> float | None:
        """Sum of a program's kernels; None where one was not measured."""
        times = self.times[condition]
        if any(kernel.signature not in times for kernel in program.kernels):
            return None
        return sum(times[kernel.signature].median_us for kernel in program.kernels)


def measure(
    source: Source,
    lab: Lab,
    beside: Lab | None,
    *,
    seconds: float,
    rotation: Rotation = "all",
    progress: Progress = lambda text: None,
) -> Found:
    """Time every signature once, at the first kernel that has it, and every program's iteration.

    With ``beside`` twice: alone, and beside a copy: while the same program's iterations run there.
    """
    conditions: tuple[Condition, ...] = ("alone",) if beside is None else ("alone", "copies")
    share = seconds / (len(conditions) * max(1, len(source.trace.programs)))
    times: dict[Condition, dict[str, BlockTimes]] = {condition: {} for condition in conditions}
    for program in source.trace.programs:
        progress(f"recording {program.name}")
        blocks = _blocks(source, lab, program, set(times["alone"]), rotation)
        progress(f"timing {program.name}")
        times["alone"] |= sample(lab, blocks, share)
        calls = source.calls(program)
        if beside is not None and calls is not None:
            progress(f"timing {program.name} beside a copy")
            memory = beside.run(partial(source.memory, program))
            runner = CoRunner.of(beside, source.trace, program, calls, memory)
            times["copies"] |= sample(lab, blocks, share, runner)
            del runner, memory
        del blocks
        free(lab)
    return Found(trace=source.trace, rotation=rotation, times=times)


def prefixes(source: Source, lab: Lab, program: Program, seconds: float) -> list[float]:
    """Microseconds of an iteration's first 1, 2, ... kernels, each in a graph of its own.

    Their differences are what each kernel adds where it runs: coarse for small ones, but without any assumption
    about caches.
    """
    calls = source.calls(program)
    if calls is None:
        return []
    memory = lab.run(partial(source.memory, program))
    names = [f"{program.name} {count}" for count in range(1, len(calls) + 1)]
    blocks = [
        iteration_block(lab, name, source.trace, program, calls[: count + 1], memory, "all")
        for count, name in enumerate(names)
    ]
    times = sample(lab, blocks, seconds)
    return [times[name].median_us for name in names]


def _blocks(source: Source, lab: Lab, program: Program, known: set[str], rotation: Rotation) -> list[Block]:
    """Blocks of the signatures that are new in a program, and of its iteration."""
    trace, blocks = source.trace, []
    for call, kernel, memory in source.walk(lab, program):
        if call is None or kernel.signature in known:
            continue
        known.add(kernel.signature)
        copies = Copies.of(
            trace,
            program,
            kernel.id,
            call[1],
            memory,
            lab.cache_bytes,
            rotation,
            lambda number: source.draw(program, number),
        )
        try:
            blocks.append(kernel_block(lab, kernel.signature, call, copies, trace, rotation))
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:
            source.unmeasured[kernel.signature] = reason(problem)
    calls = source.calls(program)
    if calls is not None:
        memory = lab.run(partial(source.memory, program))
        blocks.append(iteration_block(lab, program.name, trace, program, calls, memory, rotation))
    return blocks


def rows_of(source: Source, found: Found, device_type: str, hardware: str, load: str) -> Iterator[TimeRow]:
    """A row for each signature and condition."""
    dated = datetime.now(UTC).isoformat(timespec="seconds")
    kernels = {kernel.signature: kernel for p in source.trace.programs for kernel in p.kernels}
    for condition, times in found.times.items():
        place = Place(
            device_type=device_type,
            condition=condition,
            hardware=hardware,
            dated=dated,
            load=load if condition == "copies" else "",
        )
        for signature, kernel in kernels.items():
            if signature in times:
                yield _row(kernel, times[signature], found.rotation, place)


_STATES: Mapping[Rotation, str] = {
    "all": "all that it touches rotated",
    "weights": "weights and state rotated",
    "none": "the same buffers every time",
}


def _row(kernel: Kernel, times: BlockTimes, rotation: Rotation, place: Place) -> TimeRow:
    middle = times.median_us
    low, high = times.interval_us
    p10, p90 = (float(value) for value in np.quantile(times.times_us, (0.1, 0.9)))
    return TimeRow(
        signature=kernel.signature,
        part=WHOLE,
        device_type=place.device_type,
        condition=place.condition,
        load=place.load,
        cache="warm" if rotation == "none" else "sequence",
        median_us=middle,
        p10_us=p10,
        p90_us=p90,
        low_us=min(low, middle),
        high_us=max(high, middle),
        samples=len(times.times_us),
        flops=kernel.flops,
        bytes=kernel.read_bytes + kernel.written_bytes,
        dtype=kernel.dtype,
        source="measured",
        hardware=place.hardware,
        dated=place.dated,
        detail=f"{len(times.times_us)} CUDA graphs of {times.launches} launches, {_STATES[rotation]}",
    )


@contextmanager
def _enough_memory(trace: Trace, path: Path, device: CudaDevice) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as problem:
        free_gib = torch.cuda.mem_get_info(device.index)[0] / GIB
        weights = sum(buffer.bytes for buffer in trace.buffers if buffer.program is None) / GIB
        raise InputError(
            f"{path}: measuring it runs out of the memory of {device.torch_name} ({free_gib:.1f} GiB are free, its"
            f" weights alone take {weights:.1f}); trace fewer layers or a smaller batch, or free the device"
        ) from problem


def open_labs(device: CudaDevice) -> Sequence[CudaLab]:
    """A lab for every slice of the cut that ``device`` is of, or for the whole GPU."""
    return [CudaLab(lane) for lane in open_lanes(device)]
