"""What one instruction does to memory, for all threads of a group of blocks: turns a row of the effects table and
the values of its operands into entries of the footprint, and tells what a load may bring back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tessera_core.program.boxes import Box
from tessera_core.ptx.effects import Matrix, Touch
from tessera_core.ptx.fields import fields_of, join_fields, select_bits, zeros
from tessera_core.ptx.flow import Step, private, visible
from tessera_core.ptx.footprint import Footprint, Mode
from tessera_core.ptx.kernel import FIRST_VARIABLE, HEAP, LOCAL, PARAMETERS, SHARED, Kernel, carried_bases
from tessera_core.ptx.local import LocalMemory, Merge
from tessera_core.ptx.parameters import LaunchShape, ParameterBlock
from tessera_core.ptx.parser import type_bytes
from tessera_core.ptx.predicates import both, invert
from tessera_core.ptx.resolve import stored_values
from tessera_core.ptx.shared import SharedMemory
from tessera_core.ptx.syntax import Address, Name, Operand, Vector
from tessera_core.ptx.tensormap import DESCRIPTOR_BYTES
from tessera_core.ptx.tensors import Tensors
from tessera_core.ptx.values import (
    EITHER,
    NEVER,
    NO_BASE,
    NUMBER,
    Bool,
    Known,
    Predicate,
    Shape,
    Unknown,
    Value,
    add,
    bases_of,
    constant,
    elementwise,
    is_constant,
    mixed,
    unknown,
    unsigned,
    width_of,
)

_SPACE_BASES = {SHARED, LOCAL, PARAMETERS, HEAP}


# A register that holds a size rarely has more values than "all", "the rest" and "none".
_SIZES_LIMIT = 8


@dataclass(frozen=True, slots=True)
class _Extent:
    """``length`` bytes (None: not known) for the threads that can be, and those that must be, here."""

    length: int | None
    can: Bool
    must: Bool


class Memory:
    """The memory that one group of blocks sees, and the footprint that it leaves there.

    ``value`` evaluates an operand in the given number of bits; ``merge`` is as in `local.py`.
    """

    def __init__(
        self,
        kernel: Kernel,
        launch: LaunchShape,
        shape: Shape,
        value: Callable[[Operand, int], Value],
        merge: Merge,
    ) -> None:
        self.kernel = kernel
        self.parameters = ParameterBlock(launch.parameters, launch.relocations)
        self.shape = shape
        self.value = value
        self.footprint = Footprint()
        self.shared = SharedMemory(shape, kernel.flow.ordered)
        self.local = LocalMemory(shape, merge)
        self.carried = carried_bases(kernel, self.parameters)
        self.tensors = Tensors(kernel, self.parameters, shape, self.footprint)
        self.cancels_blocks = any(step.effects.cancels_blocks for step in kernel.flow.steps)
        self.content: Mapping[int, bytes] = {}  # of buffers that the launch only reads, see `resolve.py`

    @property
    def version(self) -> int:
        """Grows with every change of contents that no register shows."""
        return self.shared.version + self.local.version

    def record_in(self, footprint: Footprint) -> None:
        """Leave the footprint there; to be called before the first step."""
        self.footprint = self.tensors.footprint = footprint

    def finished(self) -> Footprint:
        """The footprint, when the last step has run."""
        self.tensors.finish()
        return self.footprint

    def access(self, step: Step, can: Bool, must: Bool, together: bool) -> None:
        """Record what ``step`` touches. ``together``: the whole block is at this step."""
        effects = step.effects
        if self.cancels_blocks:
            must = NEVER
        if len(step.operands) > 1 and (effects.describes is not None or effects.copies_map):
            place, other = (self.value(operand, 64) for operand in step.operands[:2])
            if effects.copies_map:
                self.tensors.copy(step, place, other)
            else:
                self.tensors.describe(step, place, other, must)
        for touch in effects.touches:
            if touch.operand >= len(step.operands):
                continue
            if touch.tensor:
                if can.any():
                    self._follow(step, touch, can)
            elif visible(touch.space):
                self._touch(step, touch, can, must)
            elif touch.space == "shared" and touch.writes and self.kernel.flow.follows_shared:
                self._store_shared(step, can, must, together)
            if touch.writes and private(touch.space):
                self._store_private(step, touch, can, must)

    def everything(self, step: Step) -> Iterator[tuple[str, Value]]:
        """Record that ``step`` may reach all buffers; its destinations may then point into any of them."""
        self.local.lose()
        self.footprint.add_everything(step.effects.reaches_all, self._line(step))
        return self._held(step, self.parameters.buffers() | NUMBER)

    def loaded(self, step: Step, can: Bool, together: bool) -> Iterator[tuple[str, Value]]:
        """The destinations of a memory instruction and what they then hold."""
        if not step.writes:
            return
        touch = step.effects.touches[0]
        if touch.operand >= len(step.operands):  # no assembler would accept it
            yield from self._held(step, self.carried)
            return
        address = step.operands[touch.operand]
        target = step.operands[0]
        place = self.value(address, 64)
        if isinstance(place, Known) and place.base in self.content:
            yield from stored_values(step, place, self.content[place.base], self.shape)
            return
        folds = touch.space == "param" or (isinstance(place, Known) and place.base == PARAMETERS)
        if folds and isinstance(address, Address) and step.parts[0] == "ld":
            size = type_bytes(step.parts[-1])
            if LOCAL in bases_of(place):
                if bases_of(place) == frozenset({LOCAL}):
                    yield from self._load_private(step, place, can)
                else:
                    yield from self._held(step, self.parameters.buffers() | NUMBER)
                return
            elements = target.elements if isinstance(target, Vector) else (target,)
            for index, element in enumerate(elements):
                if isinstance(element, Name):
                    value = self._parameter(place, index * size, size)
                    yield element.text, self._held_as(value, step.parts[-1], element.text)
            return
        if touch.space == "shared" and step.parts[0] == "ld" and self.kernel.flow.follows_shared:
            yield from self._load_shared(step, can, together)
            return
        if step.parts[0] == "ld" and private(touch.space) and bases_of(place) == frozenset({LOCAL}):
            yield from self._load_private(step, place, can)
            return
        spaces = {touch.space for touch in step.effects.touches}
        outside = all(base >= 0 for base in bases_of(place))  # in buffers, whatever its spelling
        may_hold_pointers = spaces & {"shared", "local"} or ("generic" in spaces and not outside)
        yield from self._held(step, self.carried if may_hold_pointers else NUMBER)

    def give_up(self, step: Step) -> None:
        """Record that whatever may follow ``step`` was not looked at."""
        self.footprint.add_everything("the analysis does not come to rest", self._line(step))

    def printed(self, step: Step) -> None:
        """A call that may read strings at the pointers handed to it."""
        for base in sorted(self.carried):
            if base >= 0:
                self.footprint.add_bounded("read", base, None, "a string may be printed", self._line(step))

    def _held(self, step: Step, bases: frozenset[int]) -> Iterator[tuple[str, Value]]:
        """Destinations get what memory or a callee may hold: any number, or any pointer into ``bases``."""
        width = width_of(step.parts[-1]) or 64
        for name in step.writes:
            if self.kernel.flow.width(name) == 1:
                yield name, EITHER
            elif width >= 64 or bases != NUMBER:
                yield name, unknown(width, bases)
            else:
                # the number may be extended with or without its sign into a wider register
                yield name, Unknown(NUMBER, -(1 << (width - 1)), (1 << width) - 1)

    def _load_private(self, step: Step, place: Value, can: Bool) -> Iterator[tuple[str, Value]]:
        """Destinations of a load from the thread's own memory."""
        kind, target = step.parts[-1], step.operands[0]
        size = type_bytes(kind)
        unknowns = dict(self._held(step, self.carried))
        for index, element in enumerate(target.elements if isinstance(target, Vector) else (target,)):
            if not isinstance(element, Name):
                continue
            value = self.local.load(add(self.shape, place, constant(index * size), 64), size, can)
            yield (
                element.text,
                unknowns[element.text] if value is None else self._held_as(value, kind, element.text),
            )

    def _store_private(self, step: Step, touch: Touch, can: Bool, must: Bool) -> None:
        """Follow a store to the thread's own memory, or to where that may be."""
        address = self.value(step.operands[touch.operand], 64)
        bases = bases_of(address)
        if LOCAL not in bases and not (NO_BASE in bases and touch.space != "param"):
            return
        if step.parts[0] != "st" or LOCAL not in bases or len(step.operands) < 2:
            self.local.lose()
            return
        if bases != frozenset({LOCAL}):
            must = NEVER
        stored, size = step.operands[1], type_bytes(step.parts[-1])
        for index, element in enumerate(stored.elements if isinstance(stored, Vector) else (stored,)):
            place = add(self.shape, address, constant(index * size), 64)
            self.local.store(place, self.value(element, size * 8), size, can, must)

    def _load_shared(self, step: Step, can: Bool, together: bool) -> Iterator[tuple[str, Value]]:
        kind, target, place = step.parts[-1], step.operands[0], self.value(step.operands[1], 64)
        size = type_bytes(kind)
        unknowns = dict(self._held(step, self.carried))
        for index, element in enumerate(target.elements if isinstance(target, Vector) else (target,)):
            if isinstance(element, Name):
                where = add(self.shape, place, constant(index * size), 64)
                value = self.shared.load(where, size, can, together)
                yield (
                    element.text,
                    unknowns[element.text] if value is None else self._held_as(value, kind, element.text),
                )

    def _store_shared(self, step: Step, can: Bool, must: Bool, together: bool) -> None:
        stored = step.operands[1] if len(step.operands) > 1 else step.operands[0]
        elements = stored.elements if isinstance(stored, Vector) else (stored,)
        size = type_bytes(step.parts[-1])
        values = [self.value(element, size * 8) for element in elements]
        if size < 8:
            values = [select_bits(self.shape, value, 0, size * 8) for value in values]
        self.shared.store(self.value(step.operands[0], 64), values, size, can, must, together)

    def _parameter(self, place: Value, extra: int, size: int) -> Value:
        """Fold a load from the parameter block."""
        block = self.parameters
        everything = block.buffers()
        if isinstance(place, Known) and place.base == PARAMETERS:
            if place.low == place.high:
                return block.load(place.low + extra, size)
            choices = {
                int(offset): block.load(int(offset) + extra, size)
                for offset in np.unique(place.block + place.thread)
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

    def _held_as(self, value: Value, type_name: str, register: str) -> Value:
        """Contents of memory, as a load of this type puts them into a register."""
        bits = type_bytes(type_name) * 8
        if bases_of(value) != NUMBER:
            wider = self.kernel.flow.width(register) > bits and type_name[0] != "s"
            fields = fields_of(value, bits) if wider else None
            return join_fields(self.shape, (*fields, *zeros(64 - bits)), 64) if fields else value
        return self._extended(value, type_name if width_of(type_name) else f"b{bits}", register)

    def _extended(self, value: Value, type_name: str, register: str) -> Value:
        """A loaded number in a register that may be wider: zero-extended unless its type is signed."""
        bits, width = self.kernel.flow.width(register), width_of(type_name) or 64
        if bases_of(value) != NUMBER or bits == width or type_name[0] == "s":
            return value
        return unsigned(value, width, self.shape) if bits else mixed((value,))

    def _touch(self, step: Step, touch: Touch, can: Bool, must: Bool) -> None:
        address = self.value(step.operands[touch.operand], 64)
        modes = _modes(touch)
        line = self._line(step)
        if touch.matrix is not None:
            self._fragment(step, touch, touch.matrix, address, can, must)
            return
        for extent in self._extents(step, touch, can, must):
            if extent.can.any() and extent.length != 0:
                self._record(modes, address, extent.length, extent.can, extent.must, line)

    def _extents(self, step: Step, touch: Touch, can: Bool, must: Bool) -> list[_Extent]:
        """How many bytes which threads touch."""
        found = [_Extent(touch.bytes, can, must if touch.sure else NEVER)]
        count = _operand(step, touch.count_operand)
        if count is not None:
            found = self._counted(self.value(count, 32), None, can, found[0].must)
        elif touch.count_operand is not None:
            found = [_Extent(None, can, NEVER)]
        index = touch.size_operand
        size = _operand(step, index)
        if size is None or ("L2::cache_hint" in step.parts and index == len(step.operands) - 1):
            return found
        actual = self.value(size, 32)
        if isinstance(actual, Predicate):  # under which the source is ignored
            return [
                _Extent(
                    extent.length,
                    both(self.shape, extent.can, actual.false),
                    both(self.shape, extent.must, invert(actual.true)),
                )
                for extent in found
            ]
        return [
            piece
            for extent in found
            for piece in self._counted(actual, extent.length, extent.can, extent.must)
        ]

    def _counted(self, count: Value, limit: int | None, can: Bool, must: Bool) -> list[_Extent]:
        """Extents by a number of bytes that a register holds, at most ``limit``."""
        if not isinstance(count, Known) or count.base != NO_BASE:
            return [_Extent(limit, can, NEVER)]
        parts = (count.block, count.thread)
        if count.low != count.high and min(part.size for part in parts) > 1:
            return [_Extent(_least(count.high, limit), can, NEVER)]
        each = count.block + count.thread
        sizes = np.unique(each)
        if len(sizes) > _SIZES_LIMIT:
            return [_Extent(_least(count.high, limit), both(self.shape, can, each > 0), NEVER)]
        return [
            _Extent(
                _least(int(size), limit),
                both(self.shape, can, each == size),
                both(self.shape, must, each == size),
            )
            for size in sizes
            if size > 0
        ]

    def _fragment(
        self, step: Step, touch: Touch, matrix: Matrix, address: Value, can: Bool, must: Bool
    ) -> None:
        """A matrix fragment, touched by a warp together: every thread counts as touching all of it."""
        modes, line = _modes(touch), self._line(step)
        stride = matrix.row_bytes
        named = _operand(step, touch.stride_operand)
        if named is not None:
            value = self.value(named, 32)
            if not is_constant(value):
                self._record(modes, address, None, can, NEVER, line)
                return
            assert isinstance(value, Known)
            stride = value.low * matrix.stride_unit_bits // 8
        for row in range(matrix.rows):
            place = add(self.shape, address, constant(row * stride), 64)
            self._record(modes, place, matrix.row_bytes, can, must if touch.sure else NEVER, line)

    def _follow(self, step: Step, touch: Touch, can: Bool) -> None:
        """An access through the tensor map that the operand points to, at the coordinates beside it."""
        operand = step.operands[touch.operand]
        address = self.value(operand, 64)
        coordinates: tuple[Operand, ...] = ()
        if isinstance(operand, Address) and operand.extra and isinstance(operand.extra[0], Vector):
            coordinates = operand.extra[0].elements
        values = [self.value(coordinate, 32) for coordinate in coordinates]
        line = self._line(step)
        if any(base >= 0 for base in bases_of(address)):
            self._record(["read"], address, DESCRIPTOR_BYTES, can, NEVER, line)
        self.tensors.follow(_modes(touch), touch.tensor, address, values, can, line)

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
                    known_extent = length is not None
                    reason = "the address depends on data" if known_extent else "the extent is not known"
                    self.footprint.add_bounded(mode, base, None, reason, line)

    def _line(self, step: Step) -> int:
        return self.kernel.module.line(step.at)


def _low(value: Value) -> int:
    assert isinstance(value, Known)
    return value.low


def _operand(step: Step, index: int | None) -> Operand | None:
    return step.operands[index] if index is not None and index < len(step.operands) else None


def _modes(touch: Touch) -> list[Mode]:
    modes: list[Mode] = ["read"] if touch.reads else []
    if touch.writes:
        modes.append("write")
    return modes


def _least(size: int, limit: int | None) -> int:
    return size if limit is None else min(size, limit)
