"""`tessera trace` on a trace: wrong usage, a machine without a GPU, and merged targets."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

CAPTURES = Path(__file__).parents[2] / "fixtures" / "captures"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([CAPTURES / "demo.trace"], "say what to add"),
        ([CAPTURES / "demo.trace", "--no-compile"], "--capture"),
        (["demo", "--program", "decode:batch=1,context=8"], "-o"),
    ],
    ids=["nothing to add", "how without where", "no output"],
)
def test_wrong_usage(tessera: Callable[..., Any], words: list[object], named: str) -> None:
    done = tessera("trace", *words)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and named in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a CUDA device")
def test_capture_without_a_gpu(tessera: Callable[..., Any]) -> None:
    done = tessera("trace", CAPTURES / "demo.trace", "--capture", "cuda:0", "-o", "x.trace")
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "--add-target" in done.stderr


def test_targets_are_merged_and_only_of_the_same_program(tessera: Callable[..., Any], tmp_path: Path) -> None:
    done = tessera("trace", CAPTURES / "demo.trace", "--add-target", CAPTURES / "demo.trace", "-o", "x.trace")
    assert done.returncode == 0, done.stderr
    shown = tessera("inspect", "x.trace")
    assert "sm_90-h200" in shown.stdout
    done = tessera("trace", "x.trace", "--add-target", CAPTURES / "llama-tiny.trace")
    assert done.returncode == 1 and "different programs" in done.stderr
