"""Names of device types: a catalogued base, of which a slice or another dtype may be asked.

``BASE[/sm=N][/dtype=D]``: ``h200-sxm``, ``h200-sxm/sm=96``, ``l40s/dtype=float8``, ``h200-sxm/sm=36/dtype=float8``.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from tessera_formats.errors import InputError

FORM = "BASE[/sm=N][/dtype=D]"
_PARTS = ("sm", "dtype")
_COUNT = re.compile(r"[1-9][0-9]{0,5}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeName:
    """``base``: the catalogue's name. ``multiprocessors``: of the slice; None: all. ``dtype``: in which matrix
    products are computed; None: the model's own."""

    base: str
    multiprocessors: int | None = None
    dtype: str | None = None

    def __str__(self) -> str:
        slice_of = "" if self.multiprocessors is None else f"/sm={self.multiprocessors}"
        return f"{self.base}{slice_of}{'' if self.dtype is None else f'/dtype={self.dtype}'}"

    @staticmethod
    def parse(text: str) -> TypeName:
        """Read a name; raises :class:`InputError` naming the part that is not understood."""
        base, *parts = text.split("/")
        if not base:
            raise InputError(f"device type {text!r}: has no base; write it as {FORM}")
        found: dict[str, str] = {}
        for part in parts:
            key, equals, value = part.partition("=")
            if not equals or key not in _PARTS:
                near = difflib.get_close_matches(key, _PARTS, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]}={value or '...'}?" if near else f"write it as {FORM}"
                raise InputError(f"device type {text!r}: /{part} is not known; {hint}")
            if key in found:
                raise InputError(f"device type {text!r}: says {key} twice; keep one")
            found[key] = value
        if "sm" in found and not _COUNT.fullmatch(found["sm"]):
            raise InputError(
                f"device type {text!r}: sm={found['sm']} is no number of multiprocessors; write /sm=96"
            )
        if found.get("dtype") == "":
            raise InputError(f"device type {text!r}: names no dtype; write /dtype=float8")
        name = TypeName(
            base=base,
            multiprocessors=int(found["sm"]) if "sm" in found else None,
            dtype=found.get("dtype"),
        )
        if str(name) != text:
            raise InputError(f"device type {text!r}: write it as {name}, so that it has one name everywhere")
        return name
