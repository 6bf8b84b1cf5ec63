"""Guards: which requests a trace is valid for."""

from typing import Any

import pytest

from tessera_core.program.guards import check_guards
from tessera_core.program.ir import Guard
from tessera_formats.errors import ArtifactError, GuardError


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
    check_guards(program)  # a subject that is left out is not checked
    with pytest.raises(GuardError):
        check_guards(program, inputs={"grid": [4, 9, 4]})


def test_an_input_without_an_index_means_every_element(writer: Any) -> None:
    program = guarded(writer, "input:tokens", "lt", 100)
    check_guards(program, inputs={"tokens": [0, 99]})
    with pytest.raises(GuardError):
        check_guards(program, inputs={"tokens": [0, 100]})


def test_unknown_subjects_are_refused(writer: Any) -> None:
    with pytest.raises(ArtifactError):
        check_guards(guarded(writer, "the_weather", "eq", 1), total_tokens=1)
