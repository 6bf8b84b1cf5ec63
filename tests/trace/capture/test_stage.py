"""Capture as a stage where there is no GPU, and the merging of targets."""

from pathlib import Path

import pytest
import torch

from tessera_core.program.store import load_trace, trace_tables
from tessera_core.trace.capture.modules import ModuleBook
from tessera_core.trace.capture.stage import CaptureStage, first_of_each_signature, iteration_bytes
from tessera_core.trace.capture.tables import target_tables
from tessera_core.trace.request import ProgramRequest
from tessera_core.trace.stage import TraceStage
from tessera_formats.errors import InputError, OriginError
from tessera_formats.trace import read_trace, write_trace
from tests.trace.capture.test_tables import ROOT, capture_of

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a CUDA device")


def demo(path: Path, batch: int = 1) -> Path:
    TraceStage(model="demo", programs=(ProgramRequest("decode", batch, 8),), fake=True).run(path)
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo(tmp_path_factory.mktemp("traces") / "plain.trace")


@pytest.fixture
def captured(plain: Path, tmp_path: Path) -> Path:
    """The same program with a made-up target."""
    trace = load_trace(plain)
    modules = ModuleBook()
    modules.add(5, (ROOT / "fixtures/ptx/rms_norm.sm_90.ptx").read_text())
    made = [capture_of(trace, program, kernel) for program, kernel in first_of_each_signature(trace)]
    tables = target_tables(trace, made, modules.by_handle, "sm_90", {"device": "made up"})
    targets = {f"targets/sm_90-made-up/{name}": table for name, table in tables.items()}
    write_trace(tmp_path / "made.trace", trace.info | {}, trace_tables(trace) | targets, trace.constants)
    return tmp_path / "made.trace"


def test_targets_merge_and_leave_the_program_as_it_was(plain: Path, captured: Path, tmp_path: Path) -> None:
    facts = CaptureStage(add_targets=(captured,)).run(plain, tmp_path / "both.trace")
    merged = read_trace(tmp_path / "both.trace")
    merged.check()
    assert facts.values["targets"] == ["sm_90-made-up"] and merged.targets() == ("sm_90-made-up",)
    assert merged.info["program_digest"] == read_trace(plain).info["program_digest"]
    name = "targets/sm_90-made-up/launches"
    assert merged.table(name).equals(read_trace(captured).table(name))
    assert load_trace(plain) == load_trace(tmp_path / "both.trace")


def test_targets_of_another_program_are_refused(captured: Path, tmp_path: Path) -> None:
    other = demo(tmp_path / "other.trace", batch=2)
    before = read_trace(other).digest
    with pytest.raises(OriginError, match="different programs"):
        CaptureStage(add_targets=(captured,)).run(other, other)
    assert read_trace(other).digest == before


@NO_GPU
@pytest.mark.parametrize(
    ("device", "says"),
    [("cuda:0", "no CUDA device"), ("cuda", "write it as cuda:0"), ("h200", "write it as cuda:0")],
)
def test_capture_without_the_device_is_one_line_before_any_tracing(
    device: str, says: str, tmp_path: Path
) -> None:
    stage = TraceStage(
        model="demo", programs=(ProgramRequest("decode", 1, 8),), capture=CaptureStage(device=device)
    )
    with pytest.raises(InputError, match=says) as raised:
        stage.run(tmp_path / "x.trace")
    assert "\n" not in str(raised.value) and not (tmp_path / "x.trace").exists()


def test_the_bytes_of_an_iteration_count_the_largest_program(plain: Path) -> None:
    trace = load_trace(plain)
    assert iteration_bytes(trace) == sum(b.bytes for b in trace.buffers)
