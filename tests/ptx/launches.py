"""Builds launches of the stored modules for the tests of this folder."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tessera_core.program.boxes import Box
from tessera_core.ptx.analysis import LaunchAnalysis, LaunchShape, Relocation
from tessera_core.ptx.parser import parse_module
from tessera_core.ptx.syntax import Module

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "ptx"


@dataclass(frozen=True)
class Pointer:
    """An argument that points ``byte_offset`` into a buffer."""

    buffer: int
    byte_offset: int = 0


@lru_cache
def module(stem: str) -> Module:
    """The stored module ``stem``.ptx."""
    return parse_module((FIXTURES / f"{stem}.ptx").read_text(), f"{stem}.ptx")


def launch_of(
    parsed: Module,
    entry: str,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    arguments: Sequence[Pointer | int | float | bytes],
) -> LaunchShape:
    """Lay ``arguments`` out as the entry declares; parameters left over (hidden pointers) are zero."""
    function = next(f for f in parsed.entries() if f.name == entry)
    content = bytearray(function.parameter_bytes())
    relocations: list[Relocation] = []
    offsets = function.parameter_offsets()
    for parameter, argument in zip(function.parameters, arguments, strict=False):
        at = offsets[parameter.name]
        if isinstance(argument, Pointer):
            relocations.append(Relocation(at, argument.buffer, argument.byte_offset))
        elif isinstance(argument, float):
            struct.pack_into("<f", content, at, argument)
        elif isinstance(argument, bytes):
            content[at : at + len(argument)] = argument
        else:
            content[at : at + parameter.bytes] = argument.to_bytes(parameter.bytes, "little", signed=True)
    return LaunchShape(
        entry=entry,
        grid=grid,
        block=block,
        shared_bytes=0,
        parameters=bytes(content),
        relocations=tuple(relocations),
    )


def marks(boxes: Sequence[Box] | None, size: int) -> npt.NDArray[np.bool_]:
    """One flag per byte of a buffer of ``size`` bytes; None is the whole buffer."""
    found = np.full(size, boxes is None, dtype=np.bool_)
    for box in boxes or ():
        assert box.low >= 0 and box.high <= size
        for low, high in box.intervals():
            found[low:high] = True
    return found


def claimed(
    analysis: LaunchAnalysis, sizes: Mapping[int, int], mode: str, must: bool
) -> dict[int, npt.NDArray[np.bool_]]:
    """Per buffer the bytes that may be accessed (every access), or that must be (sure ones only)."""
    found = {buffer: np.zeros(size, dtype=np.bool_) for buffer, size in sizes.items()}
    for access in analysis.accesses:
        if access.mode == mode and (access.must or not must):
            found[access.buffer] |= marks(access.boxes, sizes[access.buffer])
    return found
