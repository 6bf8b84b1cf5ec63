"""`tessera trace` on a trace: wrong usage, a machine without a GPU, and merged targets."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

CAPTURES = Path(__file__).parents[2] / "fixtures" / "captures"

ADDED = [CAPTURES / "demo.trace", "--add-target", CAPTURES / "demo.trace"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([CAPTURES / "demo.trace"], "say what to add"),
        ([CAPTURES / "demo.trace", "--no-compile"], "--capture"),
        (["demo", "--program", "decode:batch=1,context=8"], "-o"),
        ([*ADDED, "--fake", "--seed", 3, "--ptx-target", "sm_90"], "drop --seed, --fake, --ptx-target"),
        ([*ADDED, "--phase", "decode", "--batch", 2, "--context", 8], "drop --phase, --batch, --context"),
        (
            [*ADDED, "--tensor-parallel", 2, "--rank", 1, "--iteration", 0],
            "drop --tensor-parallel, --rank, --it",
        ),
        (
            ["demo", "--program", "decode:batch=1,context=8", "--batch", 4, "-o", "x"],
            "--batch: goes with --phase",
        ),
        (["m.pt2", "--context", 64, "-o", "x"], "--context: goes with --phase"),
        (["m.pt2", "--seed", 1, "-o", "x"], "--seed is for random weights"),
    ],
    ids=[
        "nothing to add",
        "how without where",
        "no output",
        "making what exists",
        "programs of what exists",
        "other ways to make what exists",
        "a batch of no program",
        "a context of no program",
        "weights that are not random",
    ],
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
