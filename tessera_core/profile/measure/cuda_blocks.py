"""Blocks: what is timed as one. Many launches of a kernel on copies taken in turn, or one iteration of a program.

Each block is a CUDA graph; another graph before it, which is not timed, empties the L2 cache and launches the kernel
once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import torch

from tessera_core.profile.measure.cuda_copies import Copies, Rotation
from tessera_core.profile.measure.cuda_lab import Lab, Replay
from tessera_core.profile.measure.cuda_values import counters
from tessera_core.program.ir import Kernel, Program, Trace
from tessera_core.program.memory import Memory
from tessera_core.trace.capture.group import Group, check_results, store_results

BLOCK_US = 600.0
"""A block lasts about so long: the fixed cost of a graph is then a percent of it, and is known to a tenth."""
LEAST_LAUNCHES, MOST_LAUNCHES = 4, 128
PILOT_LAUNCHES = 4
WARM_UPS = 2
CO_RUNNER_US = 1500.0
"""A co-runner's graph holds iterations for about so long, so that the host has time for the other device."""

Call = tuple[Kernel, Group, Callable[..., Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """``launches`` of a kernel (or one iteration), and what goes before, untimed. ``keep``: what they point into."""

    name: str
    before: Replay
    body: Replay
    launches: int
    keep: tuple[Any, ...]


def kernel_block(lab: Lab, name: str, call: Call, copies: Copies, trace: Trace, rotation: Rotation) -> Block:
    """Warm a kernel up, see how long it takes, and record as many launches as last :data:`BLOCK_US`."""
    _, group, function = call
    held: deque[Any] = deque(maxlen=_held_results(trace, group, lab.cache_bytes) if rotation == "all" else 0)

    def launch(number: int) -> None:
        held.append(function(*copies.arguments(number)))

    def warm_up() -> None:
        for _ in range(WARM_UPS):
            check_results(group, trace, function(*copies.arguments(-1)))

    lab.run(warm_up)
    estimate = _pilot(lab, partial(_repeat, PILOT_LAUNCHES, partial(launch, -1))) / PILOT_LAUNCHES
    launches = min(MOST_LAUNCHES, max(LEAST_LAUNCHES, ceil(BLOCK_US / max(estimate, 0.1))))
    # All copies exist before anything is recorded.
    lab.run(lambda: [copies.arguments(number) for number in range(launches)])

    def before() -> None:
        copies.restore()
        if rotation != "none":
            lab.flush()
        launch(-1)

    def body() -> None:
        for number in range(launches):
            launch(number)

    lab.settle()
    block = Block(
        name=name, before=lab.record(before), body=lab.record(body), launches=launches, keep=(copies,)
    )
    held.clear()
    return block


def iteration_block(
    lab: Lab,
    name: str,
    trace: Trace,
    program: Program,
    calls: Sequence[Call],
    memory: Memory,
    rotation: Rotation,
) -> Block:
    """One iteration of the kernels of ``calls`` in one graph: all of a program's, or those up to some point."""
    restore = counters(trace, program, memory)
    dying = last_uses(trace, program)
    lab.run(lambda: _iterate(calls, memory, dying))

    def before() -> None:
        restore()
        if rotation != "none":
            lab.flush()

    lab.run(restore)
    lab.settle()
    block = Block(
        name=name,
        before=lab.record(before),
        body=lab.record(lambda: _iterate(calls, memory, dying)),
        launches=1,
        keep=(memory,),
    )
    lab.run(restore)
    return block


@dataclass(frozen=True, slots=True, kw_only=True)
class CoRunner:
    """Iterations of a program on another device. ``round_us``: what its graph takes when alone."""

    lab: Lab
    graph: Replay
    round_us: float
    keep: tuple[Any, ...]

    @staticmethod
    def of(lab: Lab, trace: Trace, program: Program, calls: Sequence[Call], memory: Memory) -> CoRunner:
        """A graph of as many iterations as last :data:`CO_RUNNER_US`."""
        restore = counters(trace, program, memory)
        dying = last_uses(trace, program)

        def once() -> None:
            restore()
            _iterate(calls, memory, dying)

        lab.run(once)
        one_us = _pilot(lab, once)
        count = min(16, max(1, ceil(CO_RUNNER_US / max(one_us, 1.0))))
        graph = lab.record(partial(_repeat, count, once))
        return CoRunner(lab=lab, graph=graph, round_us=one_us * count, keep=(memory,))

    def start(self, lasting_us: float) -> tuple[Any, Any]:
        """Enqueue iterations for at least so long; timestamps of when they are under way, and of their end."""
        self.lab.launch(self.graph)
        begun = self.lab.mark()
        for _ in range(ceil(lasting_us / max(self.round_us, 1.0)) + 1):
            self.lab.launch(self.graph)
        return begun, self.lab.mark()


def last_uses(trace: Trace, program: Program) -> list[list[int]]:
    """For each kernel, the activations that no later one touches: their memory is used again."""
    kept = {trace.tensors[binding.tensor].buffer for binding in program.io}
    last: dict[int, int] = {}
    for op in program.ops:
        for tensor in (*op.inputs, *op.outputs):
            buffer = trace.tensors[tensor].buffer
            if buffer not in kept and trace.buffers[buffer].kind in ("activation", "workspace"):
                last[buffer] = max(op.kernel, last.get(buffer, 0))
    found: list[list[int]] = [[] for _ in program.kernels]
    for buffer, kernel in last.items():
        found[kernel].append(buffer)
    return found


def _iterate(calls: Sequence[Call], memory: Memory, dying: Sequence[Sequence[int]]) -> None:
    for kernel, group, function in calls:
        store_results(group, memory, function(*group.arguments(memory)))
        for buffer in dying[kernel.id]:
            memory.release(buffer)


def _repeat(times: int, work: Callable[[], object]) -> None:
    for _ in range(times):
        work()


def _pilot(lab: Lab, work: Callable[[], object]) -> float:
    """Microseconds of ``work``, the better of two."""
    graph = lab.record(work)
    found = []
    for _ in range(2):
        lab.space()
        begin = lab.mark()
        lab.launch(graph)
        end = lab.mark()
        lab.settle()
        found.append(lab.microseconds(begin, end))
    return min(found)


def _held_results(trace: Trace, group: Group, cache_bytes: int) -> int:
    """How many launches' results exceed the cache twice, so that none is written where one just was."""
    size = sum(trace.buffers[trace.tensors[tensor].buffer].bytes for tensor in group.results)
    return min(MOST_LAUNCHES, 1 + 2 * cache_bytes // size) if size else 0


def free(lab: Lab) -> None:
    """Give freed memory back to the device, so that the next program finds all of it."""
    lab.settle()
    if lab.device.startswith("cuda"):
        torch.cuda.empty_cache()
