"""The poison test finds a missed read, a missed write and a false must-write, and passes true claims; on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tessera_core.program.boxes import Box
from tessera_core.program.store import trace_from_bundle
from tessera_core.validate.poison import Boxes, Claims, PoisonResult, poison_test
from tessera_core.validate.target import validate_target
from tessera_formats.errors import InputError
from tessera_formats.trace import read_trace

CAPTURE = Path(__file__).resolve().parents[2] / "fixtures/captures/llama-tiny.trace"
SIZE = 64


def copy_half(contents: Mapping[int, torch.Tensor]) -> None:
    """Reads bytes 0 to 31 of buffer 0, writes them to 16 to 47 of buffer 1."""
    contents[1][16:48] = contents[0][:32]


def outcome(reads: Boxes, writes: Boxes, must: Boxes) -> PoisonResult:
    given = {buffer: torch.arange(SIZE, dtype=torch.uint8) + buffer for buffer in (0, 1)}
    claims = Claims(reads={0: reads}, writes={1: writes}, must={1: must})
    return poison_test(given, claims, copy_half)


TRUE = ((Box.interval(0, 32),), (Box.interval(16, 32),))


def test_true_claims_hold() -> None:
    result = outcome(TRUE[0], TRUE[1], TRUE[1])
    assert result.holds and result.deterministic
    assert result.must == 32 and result.poisoned == 32 + 64


def test_a_missed_read_is_found() -> None:
    result = outcome((Box.interval(0, 31),), TRUE[1], TRUE[1])
    assert result.kept_poison == 1 and not result.holds
    assert result.where == ("buffer 1: poison kept, 1 bytes from 47",)


def test_a_missed_write_is_found() -> None:
    result = outcome(TRUE[0], (Box.interval(16, 30),), ())
    assert result.lost_canaries == 2 and not result.holds


def test_a_false_must_write_is_found() -> None:
    result = outcome(TRUE[0], (Box.interval(16, 40),), (Box.interval(16, 40),))
    assert result.kept_poison == 8 and not result.holds


def test_a_may_write_may_leave_bytes() -> None:
    assert outcome(None, None, ()).holds
    assert outcome(TRUE[0], None, TRUE[1]).holds


def test_strided_claims() -> None:
    rows = (Box.of(0, [(4, 16)], 8),)

    def run(contents: Mapping[int, torch.Tensor]) -> None:
        contents[0].view(4, 16)[:, :8] += 1

    given = {0: torch.arange(SIZE, dtype=torch.uint8)}
    assert poison_test(given, Claims(reads={0: rows}, writes={0: rows}, must={}), run).holds
    thin = (Box.of(0, [(4, 16)], 7),)
    assert poison_test(given, Claims(reads={0: rows}, writes={0: thin}, must={}), run).lost_canaries == 4


def test_without_a_gpu_validation_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    bundle = read_trace(CAPTURE)
    with pytest.raises(InputError, match="no CUDA device") as refused:
        validate_target(trace_from_bundle(bundle), bundle, bundle.targets()[0])
    assert "\n" not in str(refused.value)


@pytest.mark.gpu
def test_the_deps_of_a_captured_model_hold_on_this_gpu() -> None:
    bundle = read_trace(CAPTURE)
    facts = validate_target(trace_from_bundle(bundle), bundle, bundle.targets()[0])
    assert facts.values["kernels_tested"] and not facts.values["kernels_refuted"]
