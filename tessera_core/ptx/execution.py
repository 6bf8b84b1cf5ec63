"""Executes single steps for all threads of a group of blocks: registers, operands, and the memory that they touch."""

from __future__ import annotations

import numpy as np

from tessera_core.program.boxes import Box
from tessera_core.ptx.effects import Touch
from tessera_core.ptx.flow import Step, visible
from tessera_core.ptx.footprint import Footprint, Mode
from tessera_core.ptx.kernel import FIRST_VARIABLE, LOCAL, PARAMETERS, SHARED, Kernel, carried_bases
from tessera_core.ptx.parameters import LaunchShape, ParameterBlock
from tessera_core.ptx.parser import type_bytes
from tessera_core.ptx.predicates import both, choose, invert, same_mask
from tessera_core.ptx.semantics import evaluate
from tessera_core.ptx.shared import SharedMemory
from tessera_core.ptx.syntax import Address, Immediate, Name, Negated, Operand, Pair, Vector
from tessera_core.ptx.values import (
    EITHER,
    NEVER,
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
    bases_of,
    constant,
    elementwise,
    fit,
    hull,
    known,
    mixed,
    unknown,
    unsigned,
    width_of,
)

_SPACE_BASES = {SHARED, LOCAL, PARAMETERS}


class Threads:
    """The registers of one group of blocks and the footprint they leave. ``blocks``: linear block indices, or None
    for a summary over all blocks, in which block indices are intervals.

    ``version`` counts register changes; with ``widen`` set, bounds that still move are dropped.
    """

    def __init__(self, kernel: Kernel, launch: LaunchShape, blocks: Int | None) -> None:
        self.kernel = kernel
        self.block_parameters = ParameterBlock(launch.parameters, launch.relocations)
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        self.shape = Shape(1 if blocks is None else len(blocks), threads, blocks is not None)
        self.special = _special_registers(launch, blocks)
        self.registers: dict[str, Value] = {}
        self.footprint = Footprint()
        self.version = 0
        self.widen = False
        self.shared = SharedMemory()
        self.carried = carried_bases(kernel, self.block_parameters)

    def predicate(self, name: str) -> Predicate:
        """The value of a guard."""
        value = self.registers.get(name)
        return value if isinstance(value, Predicate) else EITHER

    def execute(self, step: Step, can: Bool, must: Bool, together: bool) -> None:
        """Run one step that is no branch for the threads that can be, and those that must be, here. ``together``:
        the whole block is at this step, whether its guard lets all threads execute it or not."""
        if step.effects.reaches_all:
            self.footprint.add_everything(step.effects.reaches_all, self._line(step))
            self._forget(step, self.block_parameters.buffers() | NUMBER, can, must)
            return
        touches = step.effects.touches
        for touch in touches:
            if touch.operand < len(step.operands) and visible(touch.space):
                self._touch(step, touch, can, must)
            elif touch.space == "shared" and touch.writes and self.kernel.flow.follows_shared:
                self._store_shared(step, can, must, together)
        if touches:
            self._load(step, can, must, together)
        elif step.writes:
            self._compute(step, can, must)

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

    def _load(self, step: Step, can: Bool, must: Bool, together: bool) -> None:
        """Set the destinations of a memory instruction."""
        if not step.writes:
            return
        touch = step.effects.touches[0]
        address = step.operands[touch.operand]
        target = step.operands[0]
        bases: frozenset[int] | None = NUMBER
        if touch.space == "param" and isinstance(address, Address) and step.parts[0] == "ld":
            size = type_bytes(step.parts[-1])
            place = self._value(address, 64)
            elements = target.elements if isinstance(target, Vector) else (target,)
            for index, element in enumerate(elements):
                if isinstance(element, Name):
                    value = self._parameter(place, index * size, size)
                    self._write(element.text, self._extended(value, step.parts[-1], element.text), can, must)
            return
        if touch.space == "shared" and step.parts[0] == "ld" and self.kernel.flow.follows_shared:
            bases = self.shared.load(self._value(address, 64), touch.bytes or 0, can, together)
        elif any(touch.space in ("shared", "local", "generic") for touch in step.effects.touches):
            bases = None
        self._forget(step, self.carried if bases is None else bases, can, must)

    def _store_shared(self, step: Step, can: Bool, must: Bool, together: bool) -> None:
        stored = step.operands[1] if len(step.operands) > 1 else step.operands[0]
        elements = stored.elements if isinstance(stored, Vector) else (stored,)
        size = type_bytes(step.parts[-1])
        bases = [bases_of(self._value(element, size * 8)) for element in elements]
        self.shared.store(self._value(step.operands[0], 64), bases, size, can, must, together)

    def _parameter(self, place: Value, extra: int, size: int) -> Value:
        """Fold a load from the parameter block."""
        block = self.block_parameters
        everything = block.buffers()
        if isinstance(place, Known) and place.base == PARAMETERS:
            if place.low == place.high:
                return block.load(place.low + extra, size)
            choices = {
                int(offset): block.load(int(offset) + extra, size) for offset in np.unique(_laid_out(place))
            }
            if all(isinstance(value, Known) and value.base == NO_BASE for value in choices.values()):
                offsets = np.array(sorted(choices), dtype=np.int64)
                table = np.array([_low(choices[int(offset)]) for offset in offsets], dtype=np.int64)
                index = Known(NO_BASE, place.block, place.thread, place.low, place.high)
                return elementwise(
                    self.shape, lambda x: table[np.searchsorted(offsets, x)], (index,), size * 8
                )
            return Unknown(frozenset().union(*(bases_of(value) for value in choices.values())), None, None)
        return Unknown(everything or NUMBER, None, None)

    def _forget(self, step: Step, bases: frozenset[int], can: Bool, must: Bool) -> None:
        """Destinations get what memory or a callee may hold: any number, or any pointer into ``bases``."""
        width = width_of(step.parts[-1]) or 64
        for name in step.writes:
            if self.kernel.flow.width(name) == 1:
                self._write(name, EITHER, can, must)
            elif width >= 64 or bases != NUMBER:
                self._write(name, unknown(width, bases), can, must)
            else:
                # the number may be extended with or without its sign into a wider register
                self._write(name, Unknown(NUMBER, -(1 << (width - 1)), (1 << width) - 1), can, must)

    def _extended(self, value: Value, type_name: str, register: str) -> Value:
        """A loaded number in a register that may be wider: zero-extended unless its type is signed."""
        bits, width = self.kernel.flow.width(register), width_of(type_name) or 64
        if bases_of(value) != NUMBER or bits == width or type_name[0] == "s":
            return value
        return unsigned(value, width, self.shape) if bits else mixed((value,))

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

    # --- memory -------------------------------------------------------------------------------------------------

    def _touch(self, step: Step, touch: Touch, can: Bool, must: Bool) -> None:
        address = self._value(step.operands[touch.operand], 64)
        length = touch.bytes
        if step.extent is not None and step.extent < len(step.operands):
            extent = step.operands[step.extent]
            length = extent.value if isinstance(extent, Immediate) else None
        sure = touch.sure
        if touch.size_operand is not None and touch.size_operand < len(step.operands):
            hinted = "L2::cache_hint" in step.parts and touch.size_operand == len(step.operands) - 1
            size = None if hinted else self._value(step.operands[touch.size_operand], 32)
            if isinstance(size, Known) and length is not None:
                some: Bool = (size.block + size.thread) > 0
                can = both(self.shape, can, some)
                must = both(self.shape, must, some)
                length = min(length, size.high)
                sure = sure and size.low in (0, size.high)
            elif size is not None:
                sure = False
        if not can.any():
            return
        if not sure or address is None:
            must = NEVER
        line = self._line(step)
        modes: list[Mode] = []
        if touch.reads:
            modes.append("read")
        if touch.writes:
            modes.append("write")
        self._record(modes, address, length, can, must, line)

    def _record(
        self, modes: list[Mode], address: Value, length: int | None, can: Bool, must: Bool, line: int
    ) -> None:
        for base in sorted(bases_of(address)):
            if base in _SPACE_BASES:
                continue
            if base == NO_BASE:
                null = isinstance(address, Known) and address.low == address.high == 0
                what = (
                    "a null pointer is dereferenced" if null else "the base of the address is not a parameter"
                )
                self.footprint.add_everything(what, line)
                continue
            if base <= FIRST_VARIABLE:
                name = self.kernel.variables[FIRST_VARIABLE - base]
                for mode in modes if name else ():
                    self.footprint.variables.setdefault((name, mode), line)
                continue
            for mode in modes:
                if isinstance(address, Known) and length is not None:
                    self.footprint.add(mode, address, length, can, must, line)
                elif (
                    isinstance(address, Unknown)
                    and address.low is not None
                    and address.high is not None
                    and length
                ):
                    box = Box.interval(address.low, address.high - address.low + length)
                    self.footprint.add_bounded(mode, base, box, "the address depends on data", line)
                else:
                    reason = (
                        "the address depends on data"
                        if length is not None
                        else "the extent is not in the text"
                    )
                    self.footprint.add_bounded(mode, base, None, reason, line)

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

    def _line(self, step: Step) -> int:
        return self.kernel.module.line(step.at)


def _laid_out(value: Known) -> Int:
    return value.block + value.thread


def _low(value: Value) -> int:
    assert isinstance(value, Known)
    return value.low


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
