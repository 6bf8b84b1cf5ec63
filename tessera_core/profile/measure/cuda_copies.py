"""What each launch of a timed kernel works on: copies taken in turn, so that caches are as an iteration leaves them.

Within an iteration a kernel finds its weights, its state and what it looks up by its inputs cold: all of the model was
read since. Its activations were just written, but by other multiprocessors, often into the far half of the L2 cache,
and its results replace something else. So all of it is rotated over more bytes than the cache holds, small buffers with
a copy for every launch: times taken so add up to whole iterations. With activations that stay they fall short by 1 to
4% (``benchmarks.kernel_times`` compares both).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from tessera_core.program.ir import Program, Trace
from tessera_core.program.memory import Memory, view_of
from tessera_core.trace.capture.group import Group

Rotation = Literal["all", "weights", "none"]
"""all: everything that a kernel is given, and where its results go. weights: what is no activation. none: nothing."""

ROTATED_L2_MULTIPLE = 4
"""Bytes of a buffer's copies together, in sizes of the L2 cache, whose replacement is not least-recently-used."""
_COLD_KINDS = frozenset({"weight", "constant", "state", "input"})

Draw = Callable[[int], dict[int, torch.Tensor]]
"""Values of a program's inputs for batch ``number``, by buffer id."""


def copies_of(size_bytes: int, cache_bytes: int) -> int:
    """How many copies of a buffer exceed the cache by :data:`ROTATED_L2_MULTIPLE`; at least 1."""
    return max(1, -(-ROTATED_L2_MULTIPLE * cache_bytes // max(1, size_bytes)))


@dataclass(slots=True, kw_only=True)
class Copies:
    """Copies of what one kernel is given, made when first asked for and kept.

    ``limits``: most copies of each buffer. ``draw``: fresh values of inputs, so that lookups go elsewhere.
    """

    group: Group
    memory: Memory
    limits: dict[int, int]
    draw: Draw
    _storages: dict[tuple[int, int], torch.UntypedStorage]
    _arguments: dict[tuple[int, ...], list[torch.Tensor]]
    _restores: list[tuple[torch.Tensor, torch.Tensor]]
    _counted: frozenset[int]

    @staticmethod
    def of(
        trace: Trace,
        program: Program,
        kernel: int,
        group: Group,
        memory: Memory,
        cache_bytes: int,
        rotation: Rotation,
        draw: Draw,
    ) -> Copies:
        """Copies of the values that ``memory`` has now, before the kernel runs."""
        limits = {}
        for tensor in group.inputs:
            buffer = trace.tensors[tensor].buffer
            cold = trace.buffers[buffer].kind in _COLD_KINDS
            rotated = rotation == "all" or (rotation == "weights" and cold)
            limits[buffer] = copies_of(trace.buffers[buffer].bytes, cache_bytes) if rotated else 1
        return Copies(
            group=group,
            memory=memory,
            limits=limits,
            draw=draw,
            _storages={},
            _arguments={},
            _restores=[],
            _counted=frozenset(_counters(trace, program, kernel)),
        )

    def arguments(self, number: int) -> Sequence[torch.Tensor]:
        """Arguments of launch ``number``; -1 gives those that the launches from 0 on come to last."""
        turn = {buffer: number % limit for buffer, limit in self.limits.items()}
        key = tuple(turn[self.memory.trace.tensors[tensor].buffer] for tensor in self.group.inputs)
        found = self._arguments.get(key)
        if found is None:
            found = []
            for tensor in self.group.inputs:
                reference = self.memory.trace.tensors[tensor]
                found.append(view_of(self._storage(reference.buffer, turn[reference.buffer]), reference))
            self._arguments[key] = found
        return found

    def restore(self) -> None:
        """Put integers that the kernel moves on back to what they were, in all copies."""
        for target, saved in self._restores:
            target.copy_(saved)

    def _storage(self, buffer: int, turn: int) -> torch.UntypedStorage:
        place = (buffer, turn)
        if place not in self._storages:
            storage = self.memory.storage(buffer).clone()
            self._storages[place] = storage
            trace = self.memory.trace
            if trace.buffers[buffer].kind == "input" and turn:
                for target, values in self.draw(turn).items():
                    if target == buffer:
                        _whole(storage, values.numel()).copy_(values)
            if buffer in self._counted:
                view = _whole(storage, trace.buffers[buffer].bytes)
                self._restores.append((view, view.clone()))
        return self._storages[place]


def _counters(trace: Trace, program: Program, kernel: int) -> list[int]:
    """Buffers in which a kernel writes integers in place."""
    found = []
    for number in program.kernels[kernel].ops:
        for operand in program.ops[number].operands:
            reference = trace.tensors[operand.tensor]
            if operand.mode == "write" and not reference.dtype.startswith(("float", "bfloat", "complex")):
                found.append(reference.buffer)
    return found


def _whole(storage: torch.UntypedStorage, count: int) -> torch.Tensor:
    """The first bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (count,), (1,))
