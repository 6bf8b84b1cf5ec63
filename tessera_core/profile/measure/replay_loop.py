"""Replaying a trace's programs, whole or a run of their kernels, over and over, with a timestamp at every kernel
boundary.

Runs inside a pinned worker process (see ``cpu``). Where only some kernels are replayed, those before
them ran once, and what they made is put back where a kernel overwrites it.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tessera_core.program.generate import new_memory, shared_buffers
from tessera_core.program.ir import Program, Trace
from tessera_core.program.memory import Memory
from tessera_core.program.replay import KernelRunner
from tessera_core.program.weights import generator_for, materialise_weights, random_inputs

SLOTS = 4
"""Memories that iterations take in turn, as a pipeline's slots would: none finds its state in cache by luck."""

STATE_BYTES_LIMIT = 1 << 30
"""All slots of a program together stay below this, as long as one does."""

WARM_UP_ITERATIONS = 3
"""Not timed: the first ones allocate and touch memory for the first time."""

LEAST_ITERATIONS = 5
"""Timed even where the budget is over before."""

MOST_ITERATIONS = 20_000
"""Enough for any interval; further ones would only take memory."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """A memory, and the integer state that each iteration starts from (tensor in memory, its value)."""

    memory: Memory
    resets: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    def reset(self) -> None:
        """Put positions and counters back: a step moves them on, and may not run past the capacity."""
        for tensor, value in self.resets:
            tensor.copy_(value)

    def keeping(self, buffers: set[int]) -> _Slot:
        """This slot, with ``buffers`` put back as they are now too."""
        contents = [
            torch.empty(0, dtype=torch.uint8).set_(self.memory.storage(buffer)) for buffer in sorted(buffers)
        ]
        return _Slot(self.memory, (*self.resets, *((content, content.clone()) for content in contents)))


class ReplayLoop:
    """All programs of a trace, ready to be replayed on random weights, inputs and state."""

    def __init__(self, trace: Trace, trusted: bool, seed: int) -> None:
        wanted = {buffer for program in trace.programs for buffer in shared_buffers(trace, program)}
        shared = materialise_weights(trace, wanted, trusted=trusted)
        self._trace = trace
        self._runners: list[list[KernelRunner]] = []
        self._slots: list[Sequence[_Slot]] = []
        for program in trace.programs:
            self._runners.append(
                [KernelRunner(trace, program, kernel.id, trusted) for kernel in program.kernels]
            )
            self._slots.append(
                [_slot(trace, program, shared, seed, number) for number in range(slots_of(trace, program))]
            )

    def samples(
        self, program: int, seconds: float, kernels: range | None = None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Replay ``kernels`` (default: all) for about ``seconds``: nanoseconds of each, and which iterations were
        disturbed.

        Shapes (iterations, kernels) and (iterations,). An iteration is disturbed where the system gave the CPU
        to something else in the middle of it.
        """
        stretch = self._stretch(program, kernels)
        rows: list[list[int]] = []
        switches: list[int] = []
        gc.collect()
        gc.disable()
        try:
            warm_until = time.perf_counter() + seconds / 10
            warmed = 0
            while warmed < WARM_UP_ITERATIONS or time.perf_counter() < warm_until:
                stretch.iterate(warmed)
                warmed += 1
            switches.append(_switches())
            until = time.perf_counter() + seconds * 0.9
            while len(rows) < LEAST_ITERATIONS or (
                time.perf_counter() < until and len(rows) < MOST_ITERATIONS
            ):
                rows.append(stretch.iterate(len(rows)))
                switches.append(_switches())
        finally:
            gc.enable()
        stamps = np.array(rows, dtype=np.int64)
        return stamps[:, 1:] - stamps[:, :-1], np.diff(np.array(switches)) > 0

    def run_until(self, program: int, stop: Callable[[], bool], kernels: range | None = None) -> None:
        """Replay ``kernels`` (default: all) until ``stop`` says so; it is asked after each iteration."""
        stretch = self._stretch(program, kernels)
        number = 0
        while not stop():
            stretch.iterate(number)
            number += 1

    def _stretch(self, program: int, kernels: range | None) -> _Stretch:
        runners = self._runners[program]
        if kernels is None or len(kernels) == len(runners):
            return _Stretch(runners, self._slots[program])
        before = _Stretch(runners[: kernels.start], self._slots[program])
        taken = _taken_buffers(self._trace, self._trace.programs[program], kernels)
        slots = []
        for number, slot in enumerate(before.slots):
            before.iterate(number)
            slots.append(slot.keeping(taken))
        return _Stretch(runners[kernels.start : kernels.stop], slots)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Consecutive kernels, and the memories that they are replayed on in turn."""

    runners: Sequence[KernelRunner]
    slots: Sequence[_Slot]

    def iterate(self, number: int) -> list[int]:
        """One iteration on the next slot; the time at each kernel boundary, one more than kernels."""
        slot = self.slots[number % len(self.slots)]
        slot.reset()
        memory = slot.memory
        now = time.perf_counter_ns
        stamps = [now()]
        for runner in self.runners:
            runner(memory)
            stamps.append(now())
        return stamps


def _taken_buffers(trace: Trace, program: Program, kernels: range) -> set[int]:
    """Buffers made by other kernels that ``kernels`` write in place: the next iteration wants them as they were."""
    defined: set[int] = set()
    taken: set[int] = set()
    for op in program.ops:
        if op.kernel not in kernels:
            continue
        read = {trace.tensors[tensor].buffer for tensor in op.inputs}
        written = {trace.tensors[tensor].buffer for tensor in op.outputs}
        taken |= (read & written) - defined
        defined |= written
    return {buffer for buffer in taken if trace.buffers[buffer].kind in ("activation", "output")}


def _switches() -> int:
    """How often this thread has lost the CPU while it could have gone on."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def slots_of(trace: Trace, program: Program) -> int:
    """How many memories a program is replayed on."""
    size = sum(
        trace.buffers[buffer].bytes
        for buffer in {trace.tensors[binding.tensor].buffer for binding in program.io}
    )
    return max(1, min(SLOTS, STATE_BYTES_LIMIT // max(1, size)))


def _slot(
    trace: Trace,
    program: Program,
    shared: dict[int, torch.UntypedStorage],
    seed: int,
    number: int,
) -> _Slot:
    requests = range(number * program.batch, (number + 1) * program.batch)
    memory = new_memory(trace, program, shared, random_inputs(trace, program, seed, requests))
    resets = []
    for name, binding in program.bindings("state").items():
        tensor = memory.view(binding.tensor)
        if tensor.dtype.is_floating_point:  # a cache of zeros would be faster than any real one
            tensor.normal_(generator=generator_for(seed, "state", name, number))
        else:
            resets.append((tensor, tensor.clone()))
    return _Slot(memory, tuple(resets))
