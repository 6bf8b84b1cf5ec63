import pytest

from tessera_core.trace.request import ProgramRequest, parse_program
from tessera_formats.errors import InputError


def test_a_program_reads_back_as_its_name() -> None:
    request = parse_program(" decode:context=1024, batch=64 ")
    assert request == ProgramRequest("decode", 64, 1024)
    assert parse_program(request.name) == request


@pytest.mark.parametrize(
    "text",
    [
        "decode",
        "decode:",
        "decode:batch=64",
        "decode:batch=64,context=0",
        "decode:batch=-1,context=8",
        "decode:batch=1,context=8,batch=2",
        "decode:batch=1,context=8,heads=2",
        "Decode batch=1",
        "decode:batch=1.5,context=8",
    ],
)
def test_anything_else_is_one_line_that_shows_the_form(text: str) -> None:
    with pytest.raises(InputError, match="decode:batch=64,context=1024") as raised:
        parse_program(text)
    assert "\n" not in str(raised.value)
    assert repr(text) in str(raised.value)
