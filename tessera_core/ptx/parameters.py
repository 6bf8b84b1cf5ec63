"""The parameter block of a launch: its concrete bytes, and the buffers that its pointers point into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tessera_core.ptx.values import Field, Unknown, Value, constant, unknown

_POINTER_BYTES = 8


@dataclass(frozen=True, slots=True)
class Relocation:
    """The 8-byte pointer at ``offset`` of the parameter block is the base of ``buffer`` plus ``byte_offset``."""

    offset: int
    buffer: int
    byte_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchShape:
    """One launch. ``shared_bytes``: dynamic shared memory. ``parameters``: the parameter block, laid out as the
    entry declares; ``relocations`` say which of its pointers point where."""

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    parameters: bytes
    relocations: tuple[Relocation, ...]


@dataclass(frozen=True, slots=True)
class ParameterBlock:
    """Bytes and relocations; the bytes under a relocation are never read."""

    content: bytes
    relocations: Sequence[Relocation]

    def load(self, offset: int, length: int) -> Value:
        """The value of ``length`` bytes at ``offset``: a pointer, a piece of one, or a number."""
        for relocation in self.relocations:
            if offset == relocation.offset and length == _POINTER_BYTES:
                return constant(relocation.byte_offset, relocation.buffer)
        touched = frozenset(
            relocation.buffer
            for relocation in self.relocations
            if offset < relocation.offset + _POINTER_BYTES and relocation.offset < offset + length
        )
        for relocation in self.relocations:
            start = offset - relocation.offset
            if start >= 0 and start + length <= _POINTER_BYTES:
                pointer = constant(relocation.byte_offset, relocation.buffer)
                return Unknown(touched, None, None, (Field(pointer, start * 8, length * 8),))
        if touched:
            return Unknown(touched, None, None)
        if offset < 0 or offset + length > len(self.content):
            return unknown(length * 8)
        return constant(int.from_bytes(self.content[offset : offset + length], "little", signed=True))

    def touches_pointer(self, offset: int, length: int) -> bool:
        """Whether a byte of ``[offset, offset + length)`` belongs to a pointer."""
        return any(
            r.offset < offset + length and offset < r.offset + _POINTER_BYTES for r in self.relocations
        )

    def buffers(self) -> frozenset[int]:
        """All buffers that a parameter points into."""
        return frozenset(relocation.buffer for relocation in self.relocations)
