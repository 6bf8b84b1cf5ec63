"""Tensor maps: the 128-byte descriptors of the tensor memory accelerator, decoded from a launch's parameter block.

Their layout is not documented. It was learnt from what ptxas makes of ``tensormap.replace`` (PTX ISA, "Tensormap
Replace"), which it expands into plain loads and stores of the fields: equal on sm_90a, sm_100a and sm_120a with
ptxas 13.0. `tests/ptx/test_tensormap.py` compares with ``cuTensorMapEncodeTiled`` where there is a GPU.

    0x00       base address, 64 bits
    0x08       bits 4-6 rank - 1, 7-10 element type, 11-12 interleave, 13-14 swizzle, 15 fill
    0x0c-0x18  strides of dimensions 1 to 4, in units of 16 bytes: the low 32 bits each
    0x1c       their bits 32-35, four bits each
    0x20-0x30  extents of dimensions 0 to 4, minus 1
    0x34       element strides minus 1, three bits each; bits 24-31 box extent of dimension 0, minus 1
    0x38       box extents of dimensions 1 to 4, minus 1, eight bits each
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tessera_core.program.boxes import Box

DESCRIPTOR_BYTES = 128

# By the field's value (PTX ISA, "Tensormap Replace", table of element types): u8 u16 u32 s32 u64 s64 f16 f32
# f32.ftz f64 bf16 tf32 tf32.ftz. The packed types beyond them are left to the fallback.
_ELEMENT_BYTES = (1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4)

_STRIDE_UNIT_BYTES = 16
_RANK_LIMIT = 5

# One range of indices, [low, high), per dimension, the innermost first.
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMap:
    """A tiled or im2col tensor map. ``buffer`` and ``offset``: where the tensor begins. ``extents`` (elements) and
    ``box_extents`` have the innermost dimension first; ``strides`` (bytes) begins with the element's own size."""

    buffer: int
    offset: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box_extents: tuple[int, ...]
    element_strides: tuple[int, ...]

    def whole(self) -> Ranges:
        """The whole tensor."""
        return tuple((0, extent) for extent in self.extents)

    def tile(self, corner: Sequence[tuple[int, int] | None]) -> Ranges | None:
        """What boxes whose corners lie in the closed intervals ``corner`` can touch: elements outside the tensor are
        never accessed. None in ``corner``: anywhere. The result is None where nothing is left."""
        found: list[tuple[int, int]] = []
        for extent, box, place in zip(self.extents, self.box_extents, corner, strict=True):
            low, high = (0, extent) if place is None else (max(0, place[0]), min(extent, place[1] + box))
            if low >= high:
                return None
            found.append((low, high))
        return tuple(found)

    def box(self, ranges: Ranges) -> Box:
        """The bytes of a range of elements."""
        start = self.offset + sum(low * stride for (low, _), stride in zip(ranges, self.strides, strict=True))
        (low, high), *outer = ranges
        dims = [(high - low, stride) for (low, high), stride in zip(outer, self.strides[1:], strict=True)]
        return Box.of(start, dims, (high - low) * self.strides[0])


def decode_tensor_map(content: bytes, buffer: int, byte_offset: int) -> TensorMap | None:
    """The tensor map in 128 bytes whose base address is ``byte_offset`` into ``buffer``; None where its form is one
    that is not decoded (interleaved or packed elements, unused encodings)."""
    if len(content) != DESCRIPTOR_BYTES:
        return None
    (flags,) = struct.unpack_from("<I", content, 0x08)
    rank, element, interleave = (flags >> 4 & 7) + 1, flags >> 7 & 15, flags >> 11 & 3
    if rank > _RANK_LIMIT or element >= len(_ELEMENT_BYTES) or interleave:
        return None
    low = struct.unpack_from("<4I", content, 0x0C)
    (high,) = struct.unpack_from("<I", content, 0x1C)
    strides = [(low[i] | (high >> 4 * i & 15) << 32) * _STRIDE_UNIT_BYTES for i in range(rank - 1)]
    extents = [extent + 1 for extent in struct.unpack_from("<5I", content, 0x20)]
    (steps, boxes) = struct.unpack_from("<2I", content, 0x34)
    box_extents = [(steps >> 24) + 1, *((boxes >> 8 * i & 255) + 1 for i in range(4))]
    return TensorMap(
        buffer=buffer,
        offset=byte_offset,
        extents=tuple(extents[:rank]),
        strides=(_ELEMENT_BYTES[element], *strides),
        box_extents=tuple(box_extents[:rank]),
        element_strides=tuple((steps >> 3 * i & 7) + 1 for i in range(rank)),
    )


def coalesce(ranges: Iterable[Ranges]) -> list[Ranges]:
    """The same elements in fewer ranges: those that differ in one dimension and touch there are joined."""
    found = sorted(set(ranges))
    before = -1
    while found and len(found) != before:
        before = len(found)
        for axis in range(len(found[0])):
            found.sort(key=lambda item: (item[:axis], item[axis + 1 :], item[axis]))
            joined: list[Ranges] = []
            for _, group in itertools.groupby(found, key=lambda item: (item[:axis], item[axis + 1 :])):
                low, high = -1, -1
                for item in group:
                    if joined and low >= 0 and item[axis][0] <= high:
                        high = max(high, item[axis][1])
                        joined[-1] = (*item[:axis], (low, high), *item[axis + 1 :])
                    else:
                        low, high = item[axis]
                        joined.append(item)
            found = joined
    return found
