"""Guards: which requests a trace is valid for."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tessera_core.execute.batches import beyond_trace, check_requests, fixed_batches
from tessera_core.program.guards import check_guards, check_replayable
from tessera_core.program.ir import Guard, IoBinding
from tessera_core.program.weights import guarded_prompts, random_inputs
from tessera_formats.errors import ArtifactError, GuardError, InputError


def guarded(writer: Any, subject: str, comparison: str, value: int, index: int | None = None) -> Any:
    writer.guards.append(
        Guard(subject=subject, index=index, comparison=comparison, value=value, reason="because")  # type: ignore[arg-type]
    )
    return writer.trace().programs[0]


@pytest.mark.parametrize(
    ("comparison", "holding", "failing"),
    [
        ("eq", [16], [15, 17]),
        ("ne", [15, 17], [16]),
        ("lt", [15], [16, 17]),
        ("le", [15, 16], [17]),
        ("gt", [17], [15, 16]),
        ("ge", [16, 17], [15]),
    ],
)
def test_each_comparison(
    writer: Any, one_line: Any, comparison: str, holding: list[int], failing: list[int]
) -> None:
    program = guarded(writer, "total_tokens", comparison, 16)
    for count in holding:
        check_guards(program, total_tokens=count)
    for count in failing:
        with pytest.raises(GuardError) as caught:
            check_guards(program, total_tokens=count)
        assert str(count) in one_line(caught)
        assert "because" in one_line(caught)


def test_elements_of_inputs(writer: Any) -> None:
    program = guarded(writer, "input:grid", "eq", 4, index=1)
    check_guards(program, inputs={"grid": [9, 4, 9]})
    check_guards(program)  # a caller without requests has no inputs to check
    with pytest.raises(GuardError):
        check_guards(program, inputs={"grid": [4, 9, 4]})


def test_an_input_without_an_index_means_every_element(writer: Any) -> None:
    program = guarded(writer, "input:tokens", "lt", 100)
    check_guards(program, inputs={"tokens": [0, 99]})
    with pytest.raises(GuardError):
        check_guards(program, inputs={"tokens": [0, 100]})


def test_a_guard_on_an_unknown_value_does_not_hold(writer: Any, one_line: Any) -> None:
    program = guarded(writer, "input:grid", "eq", 4, index=1)
    with pytest.raises(GuardError) as caught:
        check_guards(program, inputs={"tokens": [4, 4]})
    assert "not known before a request starts" in one_line(caught)
    with pytest.raises(ArtifactError, match="which has 1"):
        check_guards(program, inputs={"grid": [4]})


def one_program(writer: Any, feeds: str | None, value: int) -> Any:
    """Two requests, whose first token is compared with ``value``; an output may feed the tokens."""
    writer.input("tokens", (2, 1), "int64")
    writer.io.append(
        IoBinding(role="output", name="next", tensor=writer.buffer("output", (2, 1), "int64"), feeds=feeds)
    )
    writer.guards.append(
        Guard(subject="input:tokens", index=0, comparison="eq", value=value, reason="because")
    )
    trace = writer.trace()
    return trace, replace(trace.programs[0], batch=2)


def test_prompts_are_the_values_that_a_run_will_use(writer: Any) -> None:
    trace, program = one_program(writer, "tokens", 0)
    found = list(guarded_prompts(trace, program, 3, [7, 8, 9, 10], ()))
    expected = [
        random_inputs(trace, program, 3, rows)["tokens"].flatten().tolist() for rows in ([7, 8], [9, 10])
    ]
    assert found == [{"tokens": values} for values in expected]
    assert list(guarded_prompts(trace, program, 3, [7, 8], [program])) == [{}]
    assert list(guarded_prompts(trace, replace(program, guards=()), 3, [7, 8], ())) == []


@pytest.mark.parametrize("feeds", [None, "tokens"])
@pytest.mark.parametrize("tokens", [1, 2])
def test_a_run_checks_the_prompts_of_every_batch(writer: Any, feeds: str | None, tokens: int) -> None:
    trace, program = one_program(writer, feeds, 1)
    trace = replace(trace, programs=(program,))
    route = SimpleNamespace(
        programs=[SimpleNamespace(name=program.name, rate=1)], batch=2, slots=1, share=1.0
    )
    models: Any = [route]
    firsts = [int(random_inputs(trace, program, 0, [r, r + 1])["tokens"][0, 0]) for r in range(0, 16, 2)]
    assert firsts[0] == 1 and 0 in firsts  # so that only a later batch fails
    known = feeds is None or tokens == 1
    if known:
        check_requests(trace, models, fixed_batches(models, 1, tokens), 0)
    with pytest.raises(GuardError, match="must be == 1" if known else "not known before"):
        check_requests(trace, models, fixed_batches(models, 8, tokens), 0)


def route(*programs: Any) -> Any:
    """A route of the programs, for batches of one request."""
    rated = [SimpleNamespace(name=p.name, rate=1, context=p.context, phase=p.phase) for p in programs]
    return SimpleNamespace(programs=rated, batch=1, slots=1, share=1.0)


@pytest.mark.parametrize(("prompt", "fits"), [(None, 8), (3, 6), (8, 1), (9, 0)])
def test_as_many_tokens_fit_as_the_cache_has_rows_and_the_last_one(
    writer: Any, prompt: int | None, fits: int
) -> None:
    capacity = Guard(subject="total_tokens", index=None, comparison="le", value=9, reason="8 rows")
    base = writer.trace()
    decode = replace(base.programs[0], name="d", phase="decode", context=8, guards=(capacity,))
    prefill = replace(decode, name="p", phase="prefill", context=prompt or 0, guards=())
    programs = (decode,) if prompt is None else (prefill, decode)
    trace, models = replace(base, programs=programs), [route(*programs)]
    if fits:
        enough = fixed_batches(models, 1, fits)
        check_requests(trace, models, enough, 0)
        assert beyond_trace(trace, models, enough) is None
    more = fixed_batches(models, 1, fits + 1)
    says = rf"with a prompt of {prompt or 1} tokens?, {fits} output tokens? fits?; "
    with pytest.raises(GuardError, match=says):
        check_requests(trace, models, more, 0)
    note = beyond_trace(trace, models, more)
    assert note is not None and re.search(says, note) and "\n" not in note


@pytest.mark.parametrize(
    ("notes", "says"),
    [
        (
            ["seen inside", "not replayable: kernel k has none; declare one"],
            "kernel k has none; declare one, or",
        ),
        (["not replayable: a; b", "not replayable: c"], r"not replayable: a; b \(and 1 more\), or simulate"),
        ([], "recorded without values; trace without --fake, or simulate"),
    ],
)
def test_what_cannot_be_replayed_says_why(writer: Any, notes: list[str], says: str) -> None:
    trace = writer.trace()
    check_replayable(replace(trace, info={"replayable": True, "notes": notes}), "x.trace", "simulate")
    with pytest.raises(InputError, match=f"^x.trace: .*{says}"):
        check_replayable(replace(trace, info={"replayable": False, "notes": notes}), "x.trace", "simulate")


def test_unknown_subjects_are_refused(writer: Any) -> None:
    with pytest.raises(ArtifactError):
        check_guards(guarded(writer, "the_weather", "eq", 1), total_tokens=1)
