"""Which iteration of a model to trace: a phase, a batch and a context, as the command line writes them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tessera_formats.errors import InputError

_FORM = re.compile(r"(?P<phase>[a-z][a-z0-9_-]*):(?P<settings>.*)")
_EXAMPLE = "write it as decode:batch=64,context=1024"


@dataclass(frozen=True, slots=True)
class ProgramRequest:
    """One program to trace: ``batch`` requests; ``context`` tokens (prefill: prompt, decode: capacity)."""

    phase: str
    batch: int
    context: int

    @property
    def name(self) -> str:
        """The program's name, e.g. ``decode:batch=64,context=1024``."""
        return f"{self.phase}:batch={self.batch},context={self.context}"


def parse_program(text: str) -> ProgramRequest:
    """Read ``PHASE:batch=B,context=C``; raises :class:`InputError` that shows the form."""
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise InputError(f"program {text!r}: is not PHASE:batch=B,context=C; {_EXAMPLE}")
    values: dict[str, int] = {}
    for setting in match["settings"].split(","):
        name, equals, number = (part.strip() for part in setting.partition("="))
        if not equals or name not in ("batch", "context") or name in values:
            raise InputError(f"program {text!r}: {setting!r} is not batch=B or context=C; {_EXAMPLE}")
        if not re.fullmatch(r"[0-9]{1,9}", number) or int(number) < 1:
            raise InputError(f"program {text!r}: {name} must be a whole number from 1 on; {_EXAMPLE}")
        values[name] = int(number)
    for name in ("batch", "context"):
        if name not in values:
            raise InputError(f"program {text!r}: lacks {name}; {_EXAMPLE}")
    return ProgramRequest(match["phase"], values["batch"], values["context"])
