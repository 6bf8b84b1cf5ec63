"""One iteration out of a profile, and its launches grouped into the kernels that are placed.

A launch belongs to the innermost operator call around the call that made it. Launches of one call that follow each
other are one kernel: a split product and its reduction are not placed apart. Where another operator's launches come
between, as inside a composite operator, they are kernels of their own, so that kernels can be run in order.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tessera_core.trace.inputs.kineto import CpuOp, GpuLaunch, Profile
from tessera_formats.errors import InputError


@dataclass(frozen=True, slots=True)
class Group:
    """A kernel in the making: ``op`` None where no operator call made the launches (a CUDA graph, other libraries)."""

    op: CpuOp | None
    launches: tuple[GpuLaunch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """``said``: which part of the profile it is, in words. ``ops``: the operator calls of its time."""

    said: str
    groups: tuple[Group, ...]
    ops: tuple[CpuOp, ...]
    device: int


def choose_iteration(profile: Profile, number: int | None) -> Iteration:
    """The iteration ``ProfilerStep#number``; None: the last one that launched anything, or the whole file.

    Raises :class:`InputError` for one that is not there, and for launches on several GPUs.
    """
    placed = [(_issued(profile, launch), launch) for launch in profile.launches]
    numbers = ", ".join(str(step.number) for step in profile.steps)
    if number is not None and number not in [step.number for step in profile.steps]:
        there = f"it has ProfilerStep {numbers}" if numbers else "it has no ProfilerStep annotations"
        raise InputError(f"{profile.path}: has no iteration {number}; {there}")
    wanted = [step for step in profile.steps if number in (None, step.number)]
    for step in reversed(wanted):
        inside = [(at, launch) for at, launch in placed if step.start_us <= at < step.end_us]
        if inside:
            ops = tuple(op for op in profile.ops if step.start_us <= op.start_us < step.end_us)
            said = f"iteration ProfilerStep#{step.number} of {numbers}"
            return _iteration(profile, said, inside, ops)
    if number is not None:
        raise InputError(
            f"{profile.path}: iteration {number} launched nothing; choose another of {numbers} (--iteration)"
        )
    return _iteration(profile, "the whole file, as one iteration", placed, profile.ops)


def _iteration(
    profile: Profile, said: str, placed: Sequence[tuple[float, GpuLaunch]], ops: tuple[CpuOp, ...]
) -> Iteration:
    devices = sorted({launch.device for _, launch in placed})
    if len(devices) > 1:
        raise InputError(
            f"{profile.path}: launches on GPUs {', '.join(map(str, devices))}; record each rank or device by itself"
        )
    innermost = _Innermost(ops)
    groups: list[tuple[CpuOp | None, list[GpuLaunch]]] = []
    for _, launch in sorted(placed, key=lambda item: (item[0], item[1].start_us, item[1].correlation)):
        call = profile.calls.get(launch.correlation)
        op = innermost.by_external.get(launch.external) if launch.external is not None else None
        if call is not None:
            op = innermost.at(call.thread, call.start_us) or op
        if groups and op is not None and groups[-1][0] is op:
            groups[-1][1].append(launch)
        else:
            groups.append((op, [launch]))
    return Iteration(
        said=said,
        groups=tuple(Group(op, tuple(launches)) for op, launches in groups),
        ops=ops,
        device=devices[0],
    )


def _issued(profile: Profile, launch: GpuLaunch) -> float:
    """When the launch was asked for; where the profile lacks the call, when the GPU ran it."""
    call = profile.calls.get(launch.correlation)
    return launch.start_us if call is None else call.start_us


class _Innermost:
    """Finds the innermost operator call around a moment of a thread."""

    def __init__(self, ops: Sequence[CpuOp]) -> None:
        self.by_external = {op.external: op for op in ops if op.external is not None}
        threads: dict[tuple[str, str], list[CpuOp]] = defaultdict(list)
        for op in ops:
            threads[op.thread].append(op)
        # Calls of a thread nest, so the innermost one changes only where one starts or ends.
        self.changes: dict[tuple[str, str], tuple[list[float], list[CpuOp | None]]] = {}
        for thread, calls in threads.items():
            self.changes[thread] = _changes(calls)

    def at(self, thread: tuple[str, str], moment: float) -> CpuOp | None:
        """The call around ``moment``; None where there is none."""
        times, calls = self.changes.get(thread, ([], []))
        index = bisect.bisect_right(times, moment) - 1
        return calls[index] if index >= 0 else None


def _changes(calls: Sequence[CpuOp]) -> tuple[list[float], list[CpuOp | None]]:
    times: list[float] = []
    current: list[CpuOp | None] = []
    running: list[CpuOp] = []

    def note(moment: float) -> None:
        times.append(moment)
        current.append(running[-1] if running else None)

    for call in sorted(calls, key=lambda op: (op.start_us, -op.end_us)):
        while running and running[-1].end_us <= call.start_us:
            moment = running.pop().end_us
            note(moment)
        running.append(call)
        note(call.start_us)
    while running:
        moment = running.pop().end_us
        note(moment)
    return times, current
