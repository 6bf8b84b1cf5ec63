"""Whether a trace can be executed, and whether a request lies within what it is valid for; asked before the
request starts.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

from tessera_core.program.ir import Guard, Program, Trace
from tessera_formats.errors import ArtifactError, GuardError, InputError

NOT_REPLAYABLE = "not replayable: "
"""What starts a trace's notes on why it cannot be executed."""

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


def check_replayable(trace: Trace, where: object, advice: str) -> None:
    """Raise :class:`InputError` with the cause, and ``advice`` besides its remedy, where ``trace`` is a plan's only.

    ``where``: the trace's path.
    """
    if trace.info["replayable"]:
        return
    causes = [str(note) for note in trace.info["notes"] if str(note).startswith(NOT_REPLAYABLE)]
    cause = causes[0] if causes else f"{NOT_REPLAYABLE}it was recorded without values; trace without --fake"
    more = f" (and {len(causes) - 1} more)" if len(causes) > 1 else ""
    raise InputError(f"{where}: {cause}{more}, or {advice}")


def check_guards(
    program: Program,
    *,
    prompt_tokens: int | None = None,
    total_tokens: int | None = None,
    inputs: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Raise :class:`GuardError` for the first guard of ``program`` that does not hold.

    ``total_tokens`` counts prompt and generated tokens of a request, ``prompt_tokens`` the former; a request of a
    decode program alone has a prompt of one token, its first input. ``inputs`` gives the elements, flattened in
    logical order, of each input whose values are known before the request starts; a guard on another one does
    not hold. A guard on an input without an index holds if it holds for every element. A count of None is not
    checked, nor are inputs if ``inputs`` is None: for a caller that has no requests, only their lengths.
    """
    counts = {"prompt_tokens": prompt_tokens, "total_tokens": total_tokens}
    for guard in program.guards:
        if guard.subject.startswith(_INPUT):
            if inputs is not None:
                _check(program, guard, _elements(program, guard, inputs), "")
        elif guard.subject in counts:
            count = counts[guard.subject]
            if count is not None:
                _check(program, guard, (count,), _room(guard, prompt_tokens))
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


def _room(guard: Guard, prompt_tokens: int | None) -> str:
    """How many tokens a request may generate under an upper bound on all of its tokens, in words."""
    if guard.subject != "total_tokens" or guard.comparison not in ("le", "lt") or prompt_tokens is None:
        return ""
    room = max(0, guard.value - (guard.comparison == "lt") - prompt_tokens)
    prompt = f"a prompt of {prompt_tokens} token{'s' * (prompt_tokens != 1)}"
    return f"; with {prompt}, {room} output token{'s fit' if room != 1 else ' fits'}"


def check_lengths(programs: Sequence[Program], output_tokens: int) -> None:
    """Raise :class:`GuardError` where the programs of a route, in phase order, aren't valid for such requests.

    A prompt has the length of the prefill program, or one token where the route has none.
    """
    prompt = programs[0].context if programs[0].phase == "prefill" else 1
    if len(programs) > 1:
        check_guards(programs[0], prompt_tokens=prompt)
    check_guards(programs[-1], prompt_tokens=prompt, total_tokens=prompt + output_tokens)


def beyond_lengths(programs: Sequence[Program], output_tokens: int) -> str | None:
    """What the reader of a simulation must know of requests that are too long for the trace; None if none is.

    A simulation executes nothing, so they can be timed, with the times of the shapes that were traced.
    """
    try:
        check_lengths(programs, output_tokens)
    except GuardError as problem:
        return f"simulated with the times of the traced shapes, which a real run refuses to leave: {problem}"
    return None


def _check(program: Program, guard: Guard, values: Sequence[int], room: str) -> None:
    holds = _COMPARISONS[guard.comparison]
    for value in values:
        if not holds(value, guard.value):
            raise GuardError(
                f"{program.name}: {guard.subject} is {value}, must be {_SIGNS[guard.comparison]} {guard.value}"
                f" ({guard.reason}){room}; trace a program that fits, or change the request"
            )
