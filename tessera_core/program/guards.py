"""Whether a request lies within what a trace is valid for; asked before the request starts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

from tessera_core.program.ir import Guard, Program
from tessera_formats.errors import ArtifactError, GuardError

_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
_SIGNS: Mapping[str, str] = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def check_guards(
    program: Program,
    *,
    prompt_tokens: int | None = None,
    total_tokens: int | None = None,
    inputs: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Raise :class:`GuardError` for the first guard of ``program`` that does not hold.

    ``total_tokens`` counts prompt and generated tokens of a request. ``inputs`` gives an input's elements,
    flattened; a guard on an input without an index holds if it holds for every element. Subjects that the
    caller leaves out are not checked.
    """
    counts = {"prompt_tokens": prompt_tokens, "total_tokens": total_tokens}
    for guard in program.guards:
        if guard.subject.startswith("input:"):
            values = (inputs or {}).get(guard.subject.removeprefix("input:"))
            if values is not None:
                _check(
                    program, guard, values if guard.index is None else values[guard.index : guard.index + 1]
                )
        elif guard.subject in counts:
            count = counts[guard.subject]
            if count is not None:
                _check(program, guard, (count,))
        else:
            raise ArtifactError(f"{program.name}: guard on unknown subject {guard.subject!r}; trace again")


def _check(program: Program, guard: Guard, values: Sequence[int]) -> None:
    holds = _COMPARISONS[guard.comparison]
    for value in values:
        if not holds(value, guard.value):
            raise GuardError(
                f"{program.name}: {guard.subject} is {value}, must be {_SIGNS[guard.comparison]} {guard.value}"
                f" ({guard.reason}); trace a program that fits, or change the request"
            )
