"""Executes single steps for all threads of a group of blocks: registers and operands here, memory in `memory.py`."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tessera_core.ptx.flow import Step
from tessera_core.ptx.kernel import Kernel
from tessera_core.ptx.memory import Memory
from tessera_core.ptx.parameters import LaunchShape
from tessera_core.ptx.predicates import choose, invert, same_mask
from tessera_core.ptx.semantics import evaluate
from tessera_core.ptx.syntax import Address, Immediate, Name, Negated, Operand, Pair, Vector
from tessera_core.ptx.values import (
    EITHER,
    NO_BASE,
    NUMBER,
    ZERO,
    Bool,
    Int,
    Known,
    Predicate,
    Shape,
    Unknown,
    Value,
    add,
    constant,
    elementwise,
    fit,
    hull,
    known,
    mixed,
    unknown,
    width_of,
)


class Threads:
    """The registers of one group of blocks and the footprint they leave. ``blocks``: linear block indices, or None
    for a summary over all blocks, in which block indices are intervals.

    ``version`` counts register changes; with ``widen`` set, bounds that still move are dropped.
    """

    def __init__(self, kernel: Kernel, launch: LaunchShape, blocks: Int | None) -> None:
        self.kernel = kernel
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        self.shape = Shape(1 if blocks is None else len(blocks), threads, blocks is not None)
        self.special = _special_registers(launch, blocks)
        self.registers: dict[str, Value] = {}
        self.version = 0
        self.widen = False
        self.memory = Memory(kernel, launch, self.shape, self._value)

    def predicate(self, name: str) -> Predicate:
        """The value of a guard."""
        value = self.registers.get(name)
        return value if isinstance(value, Predicate) else EITHER

    def execute(self, step: Step, can: Bool, must: Bool, together: bool) -> None:
        """Run one step that is no branch for the threads that can be, and those that must be, here. ``together``:
        the whole block is at this step, whether its guard lets all threads execute it or not."""
        if step.effects.reaches_all:
            self._set(self.memory.everything(step), can, must)
        elif step.effects.touches:
            self.memory.access(step, can, must, together)
            self._set(self.memory.loaded(step, can, together), can, must)
        elif step.writes:
            self._compute(step, can, must)

    def _set(self, values: Iterable[tuple[str, Value]], can: Bool, must: Bool) -> None:
        for name, value in values:
            self._write(name, value, can, must)

    def _compute(self, step: Step, can: Bool, must: Bool) -> None:
        parts, operands = step.parts, step.operands
        width = width_of(parts[-1]) or 64
        target = operands[0]
        if parts[0] == "mov" and (isinstance(target, Vector) or isinstance(operands[1], Vector)):
            self._repack(step, can, must)
            return
        sources = tuple(
            self._value(operand, 64 if index == 2 and "wide" in parts else width)
            for index, operand in enumerate(operands[1:])
        )
        result = evaluate(self.shape, parts, sources)
        if isinstance(target, Name):
            self._write(target.text, result, can, must)
        elif (
            isinstance(target, Pair)
            and parts[0] == "setp"
            and len(sources) == 2
            and isinstance(result, Predicate)
        ):
            for part, value in (
                (target.first, result),
                (target.second, Predicate(result.false, result.true)),
            ):
                if isinstance(part, Name):
                    self._write(part.text, value, can, must)
        else:
            predicates = parts[0] == "setp"
            for name in step.writes:
                self._write(name, EITHER if predicates else mixed(sources), can, must)

    def _repack(self, step: Step, can: Bool, must: Bool) -> None:
        """``mov`` between one register and the pieces of it (little end first)."""
        target, source = step.operands[0], step.operands[1]
        width = width_of(step.parts[-1]) or 64
        if isinstance(target, Vector):
            piece = width // max(1, len(target.elements))
            whole = source if not isinstance(source, Vector) else None
            value = unknown(width) if whole is None else self._value(whole, width)
            for index, element in enumerate(target.elements):
                if isinstance(element, Name):
                    self._write(element.text, self._piece(value, index * piece, piece), can, must)
            return
        assert isinstance(source, Vector)
        piece = width // max(1, len(source.elements))
        values = tuple(self._value(element, piece) for element in source.elements)
        numbers = tuple(value for value in values if isinstance(value, Known) and value.base == NO_BASE)
        result: Value = mixed(values, width)
        if len(numbers) == len(values) and width <= 64:
            mask = np.int64((1 << piece) - 1)
            shifts = [np.int64(index * piece) for index in range(len(values))]
            result = elementwise(
                self.shape,
                lambda *parts: np.bitwise_or.reduce(
                    np.broadcast_arrays(
                        *((part & mask) << shift for part, shift in zip(parts, shifts, strict=True))
                    )
                ),
                numbers,
                width,
            )
            if isinstance(result, Known):
                result = fit(result, width, self.shape)
        for name in step.writes:
            self._write(name, result, can, must)

    def _piece(self, value: Value, start: int, bits: int) -> Value:
        if not isinstance(value, Known) or value.base != NO_BASE:
            return mixed((value,), bits)
        moved = elementwise(self.shape, lambda x: x >> np.int64(start), (value,), 64)
        if not isinstance(moved, Known):
            return mixed((value,), bits)
        return fit(moved, bits, self.shape)

    def _write(self, name: str, value: Value, can: Bool, must: Bool) -> None:
        old = self.registers.get(name)
        if old is None or (can.all() and must.all()):
            new = value
        elif same_mask(can, must):
            new = choose(self.shape, Predicate(can, invert(can)), value, old)
        else:
            new = hull(old, value, self.widen)
        if new is not old:
            self.version += 1
            self.registers[name] = new

    # --- operands -----------------------------------------------------------------------------------------------

    def _value(self, operand: Operand, width: int) -> Value:
        if isinstance(operand, Name):
            return self._named(operand.text)
        if isinstance(operand, Immediate):
            if operand.value is None:
                return unknown(width)
            half = 1 << (width - 1)
            return constant(((operand.value + half) % (1 << width)) - half)
        if isinstance(operand, Address):
            return add(self.shape, self._value(operand.base, 64), constant(operand.offset), 64)
        if isinstance(operand, Negated):
            value = self._value(operand.operand, width)
            if isinstance(value, Predicate):
                return Predicate(value.false, value.true)
            return mixed((value,), width)
        return unknown(width)

    def _named(self, text: str) -> Value:
        value = self.registers.get(text)
        if value is not None:
            return value
        value = self.special.get(text)
        if value is not None:
            return value
        return self.kernel.symbols.get(text, unknown())


def _special_registers(launch: LaunchShape, blocks: Int | None) -> dict[str, Value]:
    """Thread and block indices; ``blocks`` None makes block indices intervals."""
    found: dict[str, Value] = {}
    threads = np.arange(launch.block[0] * launch.block[1] * launch.block[2], dtype=np.int64)
    inner_threads, inner_blocks = 1, 1
    for axis, threads_here, blocks_here in zip("xyz", launch.block, launch.grid, strict=True):
        found[f"%ntid.{axis}"] = constant(threads_here)
        found[f"%nctaid.{axis}"] = constant(blocks_here)
        found[f"%tid.{axis}"] = _index(ZERO, (threads // inner_threads % threads_here)[None, :])
        if blocks is None:
            found[f"%ctaid.{axis}"] = Unknown(NUMBER, 0, blocks_here - 1)
        else:
            found[f"%ctaid.{axis}"] = _index((blocks // inner_blocks % blocks_here)[:, None], ZERO)
        inner_threads *= threads_here
        inner_blocks *= blocks_here
    found["%laneid"] = _index(ZERO, (threads % 32)[None, :])
    return found


def _index(block: Int, thread: Int) -> Known:
    value = known(block, thread)
    return constant(value.low) if value.low == value.high else value
