"""Accesses through tensor maps: which tensor a map in the parameter block or in memory describes, and which of its
tiles a group of blocks copies. The tiles are collected until the group is done and then joined, so that a matrix
product that walks along a row leaves one box and not one per step.

A map that the launch itself builds in memory (``tensormap.replace``, then a copy to global memory) leads to the
buffer whose pointer was put into it; a map that it finds in memory could lead anywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tessera_core.ptx.flow import Step
from tessera_core.ptx.footprint import Footprint, Mode
from tessera_core.ptx.kernel import PARAMETERS, SHARED, Kernel
from tessera_core.ptx.parameters import ParameterBlock
from tessera_core.ptx.syntax import Operand, registers
from tessera_core.ptx.tensormap import DESCRIPTOR_BYTES, Ranges, TensorMap, coalesce, decode_tensor_map
from tessera_core.ptx.values import NO_BASE, NUMBER, Bool, Int, Known, Predicate, Shape, Value, bases_of

# A closed interval per coordinate, None where nothing is known of it.
_Corner = tuple[tuple[int, int] | None, ...]

# More separate tiles than this are replaced by their bounds.
_TILES_LIMIT = 2048

# Places of tiles are laid out for all blocks and threads up to this many.
_DENSE_LIMIT = 1 << 20

_DATA = "the place of a tile depends on data"
_FOREIGN = "a tensor map in memory that the launch does not build"


@dataclass(frozen=True, slots=True)
class _Replaced:
    """The last ``tensormap.replace`` of an address: in which basic block, where (value and
    operand), and by which buffers' pointer."""

    block: int
    address: Value
    operand: Operand
    bases: frozenset[int]


class Tensors:
    """The tensor maps of one group of blocks."""

    def __init__(
        self, kernel: Kernel, parameters: ParameterBlock, shape: Shape, footprint: Footprint
    ) -> None:
        self.kernel = kernel
        self.parameters = parameters
        self.shape = shape
        self.footprint = footprint
        self.maps: dict[int, TensorMap | None] = {}
        self.tiles: dict[tuple[int, Mode], set[Ranges]] = {}
        self.described: set[int] = set()
        self.replaced: _Replaced | None = None
        # maps in memory: address, and the buffers that they lead to (None: any that a map of the launch leads to)
        self.built: list[tuple[Value, frozenset[int] | None]] = []
        self.followed: list[tuple[Value, Mode, int]] = []
        self.block_numbers = _block_numbers(kernel) if _builds_maps(kernel) else {}

    def describe(self, step: Step, address: Value, pointer: Value, must: Bool) -> None:
        """``pointer`` becomes the base address of the map at ``address``."""
        bases = bases_of(pointer)
        self.described |= bases
        if bases_of(address) == {SHARED}:
            self.replaced = None
            if must.any():
                place = step.operands[0]
                self.replaced = _Replaced(self.block_numbers[step.at], address, place, bases)
        else:
            self.built.append((address, bases))

    def copy(self, step: Step, target: Value, source: Value) -> None:
        """The map at ``source`` in shared memory is copied to ``target``. Which one it is, is known where it was
        completed in this very stretch of code; otherwise it may be any of the launch."""
        last = self.replaced
        if (
            last is not None
            and last.block == self.block_numbers[step.at]
            and (_same(last.address, source) or self._is_constant(last.operand, step.operands[1]))
        ):
            self.built.append((target, last.bases))
        else:
            self.built.append((target, None))

    def _is_constant(self, x: Operand, y: Operand) -> bool:
        """Whether two operands are one address because their register is set once in the whole kernel."""
        writers = sum(1 for step in self.kernel.flow.steps if set(registers(x)) & set(step.writes))
        return x == y and writers <= 1

    def follow(
        self,
        modes: Sequence[Mode],
        form: str,
        address: Value,
        coordinates: Sequence[Value],
        can: Bool,
        line: int,
    ) -> None:
        """Tiles of the tensor behind the map at ``address`` are accessed; ``form``: tile, im2col or gather."""
        for base in sorted(bases_of(address)):
            if base >= 0:
                self.followed.extend((address, mode, line) for mode in modes)
            elif base != PARAMETERS:
                self.footprint.add_everything(_FOREIGN, line)
            elif isinstance(address, Known) and address.low == address.high:
                self._parameter(modes, form, address.low, coordinates, can, line)
            else:
                self._buffers(modes, 0, len(self.parameters.content), "one of several tensor maps", line)

    def _parameter(
        self,
        modes: Sequence[Mode],
        form: str,
        offset: int,
        coordinates: Sequence[Value],
        can: Bool,
        line: int,
    ) -> None:
        if offset not in self.maps:
            self.maps[offset] = self._decoded(offset)
        tensor = self.maps[offset]
        if tensor is None or (form == "tile" and len(coordinates) != len(tensor.extents)):
            self._buffers(modes, offset, DESCRIPTOR_BYTES, "a tensor map of a form that is not decoded", line)
            return
        if form != "tile":
            tiles, exact, reason = [tensor.whole()], False, f"{form} coordinates are not followed"
        else:
            corners, exact, reason = self._corners(tensor, coordinates, can)
            tiles = [tile for corner in corners if (tile := tensor.tile(corner)) is not None]
            if exact and any(step > 1 for step in tensor.element_strides):
                exact, reason = False, "the tensor map skips elements"
        for mode in modes:
            if exact:
                self.footprint.first_line.setdefault((tensor.buffer, mode), line)
                self.tiles.setdefault((offset, mode), set()).update(tiles)
            else:
                for tile in tiles:
                    self.footprint.add_bounded(mode, tensor.buffer, tensor.box(tile), reason, line)

    def _decoded(self, offset: int) -> TensorMap | None:
        content = self.parameters.content[offset : offset + DESCRIPTOR_BYTES]
        for relocation in self.parameters.relocations:
            if relocation.offset == offset:
                return decode_tensor_map(content, relocation.buffer, relocation.byte_offset)
        return None

    def _buffers(self, modes: Sequence[Mode], offset: int, length: int, reason: str, line: int) -> None:
        """All allocations that the parameter bytes ``[offset, offset + length)`` point into may be accessed."""
        buffers = {
            relocation.buffer
            for relocation in self.parameters.relocations
            if self.parameters.touches_pointer(offset, length)
            and offset <= relocation.offset < offset + length
        }
        if not buffers:
            self.footprint.add_everything("a tensor map that holds no pointer of the launch", line)
        for buffer in sorted(buffers):
            for mode in modes:
                self.footprint.add_bounded(mode, buffer, None, reason, line)

    def _corners(
        self, tensor: TensorMap, coordinates: Sequence[Value], can: Bool
    ) -> tuple[list[_Corner], bool, str]:
        """Where tiles begin, whether these are all and only the real places, and if not, why."""
        bounds = tuple(_bounds(value) for value in coordinates)
        if not all(isinstance(value, Known) and value.base == NO_BASE for value in coordinates):
            return [bounds], False, _DATA
        places = self._places([value for value in coordinates if isinstance(value, Known)], can)
        if places is None:
            return [bounds], False, "too many tiles"
        choices = [np.unique(axis) for axis in places.T]
        if int(np.prod([len(choice) for choice in choices])) == len(places):
            runs = [_runs(choice, box) for choice, box in zip(choices, tensor.box_extents, strict=True)]
            if int(np.prod([len(run) for run in runs])) <= _TILES_LIMIT:
                return list(itertools.product(*runs)), True, ""
        elif len(places) <= _TILES_LIMIT:
            return [tuple((int(x), int(x)) for x in place) for place in places], True, ""
        return [bounds], False, "too many tiles"

    def _places(self, coordinates: Sequence[Known], can: Bool) -> Int | None:
        """The distinct coordinates over all blocks and threads, shape (places, dimensions); None where they are too
        many to lay out."""
        shapes = [value.block.shape for value in coordinates] + [value.thread.shape for value in coordinates]
        threads = max(shape[1] for shape in shapes)
        mask = can if threads > 1 else can.any(axis=1, keepdims=True)
        full = np.broadcast_shapes(*shapes, mask.shape)
        if full[0] * full[1] > _DENSE_LIMIT:
            return None
        chosen = np.broadcast_to(mask, full)
        columns = [np.broadcast_to(value.block + value.thread, full)[chosen] for value in coordinates]
        return np.unique(np.stack(columns, axis=1), axis=0)

    def finish(self) -> None:
        """Put what was collected into the footprint; to be called once, when the group is done."""
        for (offset, mode), tiles in self.tiles.items():
            tensor = self.maps[offset]
            assert tensor is not None
            self.footprint.add_boxes(mode, tensor.buffer, [tensor.box(tile) for tile in coalesce(tiles)])
        for address, mode, line in self.followed:
            for buffer in sorted(self._led_to(address, line)):
                self.footprint.add_bounded(mode, buffer, None, "a tensor map that the launch builds", line)

    def _led_to(self, address: Value, line: int) -> frozenset[int]:
        found: set[int] = set()
        met = False
        for place, bases in self.built:
            if _may_overlap(place, address):
                met = True
                found |= self.described if bases is None else bases
        if not met:
            self.footprint.add_everything(_FOREIGN, line)
        elif any(base < 0 for base in found):
            self.footprint.add_everything("the address in a tensor map is not a parameter", line)
        return frozenset(base for base in found if base >= 0)


def _bounds(value: Value) -> tuple[int, int] | None:
    if isinstance(value, Predicate) or bases_of(value) != NUMBER or value.low is None or value.high is None:
        return None
    return (value.low, value.high)


def _runs(corners: Int, box: int) -> list[tuple[int, int]]:
    """Ascending corners as closed intervals within which the boxes that begin there leave no gap."""
    breaks = np.flatnonzero(np.diff(corners) > box)
    firsts = np.concatenate(([0], breaks + 1))
    lasts = np.concatenate((breaks, [len(corners) - 1]))
    return [(int(corners[first]), int(corners[last])) for first, last in zip(firsts, lasts, strict=True)]


def _same(x: Value, y: Value) -> bool:
    return (
        isinstance(x, Known)
        and isinstance(y, Known)
        and x.base == y.base
        and np.array_equal(x.block, y.block)
        and np.array_equal(x.thread, y.thread)
    )


def _may_overlap(x: Value, y: Value) -> bool:
    """Whether a map at one address may share bytes with a map at the other."""
    if not bases_of(x) & bases_of(y):
        return False
    if not isinstance(x, Known) or not isinstance(y, Known):
        return True
    if x.high + DESCRIPTOR_BYTES <= y.low or y.high + DESCRIPTOR_BYTES <= x.low:
        return False
    if max(x.block.size * x.thread.size, y.block.size * y.thread.size) > _DENSE_LIMIT:
        return True
    first, second = np.unique(x.block + x.thread), np.unique(y.block + y.thread)
    after = np.searchsorted(first, second - DESCRIPTOR_BYTES, side="right")
    return bool(np.any(after < np.searchsorted(first, second + DESCRIPTOR_BYTES, side="left")))


def _builds_maps(kernel: Kernel) -> bool:
    return any(step.effects.describes is not None or step.effects.copies_map for step in kernel.flow.steps)


def _block_numbers(kernel: Kernel) -> dict[int, int]:
    """The basic block of every step, by the step's place in the text."""
    steps = kernel.flow.steps
    begins = {target for step in steps for target in step.targets}
    return dict(_numbered(steps, begins))


def _numbered(steps: Sequence[Step], begins: set[int]) -> Iterator[tuple[int, int]]:
    number = 0
    for index, step in enumerate(steps):
        number += index in begins
        yield step.at, number
        number += bool(step.targets) or step.ends or bool(step.effects.reaches_all)
