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

_INPUT = "input:"


def check_guards(
    program: Program,
    *,
    prompt_tokens: int | None = None,
    total_tokens: int | None = None,
    inputs: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Raise :class:`GuardError` for the first guard of ``program`` that does not hold.

    ``total_tokens`` counts prompt and generated tokens of a request. ``inputs`` gives the elements, flattened in
    logical order, of each input whose values are known before the request starts; a guard on another one does
    not hold. A guard on an input without an index holds if it holds for every element. A count of None is not
    checked, nor are inputs if ``inputs`` is None: for a caller that has no requests, only their lengths.
    """
    counts = {"prompt_tokens": prompt_tokens, "total_tokens": total_tokens}
    for guard in program.guards:
        if guard.subject.startswith(_INPUT):
            if inputs is not None:
                _check(program, guard, _elements(program, guard, inputs))
        elif guard.subject in counts:
            count = counts[guard.subject]
            if count is not None:
                _check(program, guard, (count,))
        else:
            raise ArtifactError(f"{program.name}: guard on unknown subject {guard.subject!r}; trace again")


def guarded_inputs(program: Program) -> frozenset[str]:
    """Names of the inputs that guards of ``program`` look at."""
    return frozenset(
        guard.subject.removeprefix(_INPUT) for guard in program.guards if guard.subject.startswith(_INPUT)
    )


def _elements(program: Program, guard: Guard, inputs: Mapping[str, Sequence[int]]) -> Sequence[int]:
    name = guard.subject.removeprefix(_INPUT)
    if name not in inputs:
        raise GuardError(
            f"{program.name}: depends on the values of input {name} ({guard.reason}), which are not known before"
            " a request starts; trace a step that does not read them on the host"
        )
    values = inputs[name]
    if guard.index is None:
        return values
    if not 0 <= guard.index < len(values):
        raise ArtifactError(
            f"{program.name}: guard on element {guard.index} of input {name}, which has {len(values)}; trace again"
        )
    return (values[guard.index],)


def _check(program: Program, guard: Guard, values: Sequence[int]) -> None:
    holds = _COMPARISONS[guard.comparison]
    for value in values:
        if not holds(value, guard.value):
            raise GuardError(
                f"{program.name}: {guard.subject} is {value}, must be {_SIGNS[guard.comparison]} {guard.value}"
                f" ({guard.reason}); trace a program that fits, or change the request"
            )
