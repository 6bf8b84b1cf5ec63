"""What copies and fills touch: exactly the bytes that the words of the launch name.

Their parameter block holds 8-byte words (see docs/trace.md). A copy: destination, source, width in bytes, height,
depth, pitch and height of the destination, pitch and height of the source. A fill: destination, value, bytes of an
element, width in elements, height, pitch.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from tessera_core.deps.accesses import Touch
from tessera_core.deps.launches import Launch
from tessera_core.program.boxes import Box
from tessera_core.program.ir import Mode


def copy_touches(launch: Launch, buffer_bytes: Mapping[int, int] | Sequence[int]) -> tuple[Touch, ...]:
    """Touches of a launch whose kind is memcpy or memset.

    A side whose word is no pointer into a buffer touches none; bytes past a buffer's end leave all of it touched.
    """
    words = struct.unpack_from(f"<{len(launch.parameters) // 8}Q", launch.parameters)
    if launch.kind == "memset":
        _, _, item, width, height, pitch = words[:6]
        sides: list[tuple[Mode, int, Box | None]] = [("write", 0, _box(item * width, (height, pitch)))]
    else:
        _, _, width, height, depth, to_pitch, to_height, from_pitch, from_height = words[:9]
        sides = [
            ("read", 8, _box(width, (depth, from_pitch * from_height), (height, from_pitch))),
            ("write", 0, _box(width, (depth, to_pitch * to_height), (height, to_pitch))),
        ]
    places = {relocation.offset: relocation for relocation in launch.relocations}
    touches = []
    for mode, offset, box in sides:
        place = places.get(offset)
        if place is None or box is None:
            continue
        moved = box.shifted(place.byte_offset)
        inside = moved.high <= buffer_bytes[place.buffer]
        touches.append(
            Touch(
                buffer=place.buffer,
                mode=mode,
                must=mode == "write" and inside,
                boxes=(moved,) if inside else None,
                evidence="ptx",
                precision="exact" if inside else "bounded",
                detail="" if inside else f"{launch.function}: reaches past the end of the buffer",
            )
        )
    return tuple(touches)


def _box(run: int, *dims: tuple[int, int]) -> Box | None:
    """The bytes of rows; None where there is none. Pitches of a single row may be anything."""
    if run == 0 or any(count == 0 for count, _ in dims):
        return None
    return Box.of(0, dims, run)
