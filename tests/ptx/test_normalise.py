"""The hash of a module follows what it computes and nothing else."""

import re

import pytest

from tessera_core.ptx.normalise import module_hash
from tests.ptx.launches import FIXTURES

TEXT = (FIXTURES / "matmul.sm_80.ptx").read_text()
FILES = sorted(FIXTURES.glob("*.ptx"))


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("matmul", "another_name"),
        lambda text: re.sub(r"\$L__BB0_(\d+)", r"$other_\1", text),
        lambda text: re.sub(r"\$L__tmp\d+:", "", text),
        lambda text: re.sub(r"%rd(\d|<)", r"%wide\1", text),
        lambda text: re.sub(r"\.(loc|file)[^\n]*", "", text),
        lambda text: re.sub(r"//[^\n]*", "/* anything */", text),
        lambda text: text.replace("global_smem", "scratch"),
        lambda text: text.replace("\t", "  "),
    ],
)
def test_names_and_debug_lines_do_not_count(change: object) -> None:
    assert callable(change)
    changed = change(TEXT)
    assert changed != TEXT
    assert module_hash(changed) == module_hash(TEXT)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("sm_80", "sm_90"),
        ("add.s32", "sub.s32"),
        (".reqntid 128", ".reqntid 256"),
        ("div.s32 \t%r39, %r1, %r38", "div.s32 \t%r39, %r38, %r1"),
        ("@%p1 bra", "@!%p1 bra"),
        ("bfe.u32 \t%r4, %r3, 2, 5", "bfe.u32 \t%r4, %r3, 2, 6"),
        (".reg .b64 \t%rd", ".reg .f64 \t%rd"),
    ],
)
def test_everything_else_counts(old: str, new: str) -> None:
    assert old in TEXT
    assert module_hash(TEXT.replace(old, new, 1)) != module_hash(TEXT)


def test_all_stored_modules_differ() -> None:
    assert len({module_hash(path.read_text()) for path in FILES}) == len(FILES)
