"""The recorded times of one H200 and of slices of it: complete, of the captured traces, adding up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import kernel_times
from tessera_core.profile.merge import load_profiles
from tessera_core.program.store import load_trace

ROOT = Path(__file__).parents[3]
NAMES = sorted(path.stem for path in (ROOT / "fixtures/captures").glob("*.trace"))
TYPES = ("h200-sxm", "h200-sxm/sm=96", "h200-sxm/sm=36")


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks/results/kernel_times.json").read_text())
    return found


def test_every_captured_trace_has_a_profile() -> None:
    profiles = {path.name.removesuffix(".profile.arrow") for path in _profiles()}
    assert profiles == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_holds_every_kernel_on_every_device(name: str) -> None:
    trace = load_trace(ROOT / f"fixtures/captures/{name}.trace")
    times = load_profiles([ROOT / f"fixtures/profiles/{name}.profile.arrow"])
    assert times.program_digest == trace.digest
    for program in trace.programs:
        for kernel in program.kernels:
            for kind in TYPES:
                rows = times.rows[kernel.signature, "whole", kind]
                wanted = {"alone"} if kind == TYPES[0] else {"alone", "copies"}
                assert {row.condition for row in rows} == wanted
                assert all(row.source == "measured" and "NVIDIA H200" in row.hardware for row in rows)


@pytest.mark.parametrize("name", NAMES)
def test_kernels_add_up_to_the_iterations_of_the_same_run(name: str, recorded: dict[str, Any]) -> None:
    trace = load_trace(ROOT / f"fixtures/captures/{name}.trace")
    times = load_profiles([ROOT / f"fixtures/profiles/{name}.profile.arrow"])
    for kind, place in zip(TYPES, ("cuda:0", "cuda:0/sm=96+36#0", "cuda:0/sm=96+36#1")):
        for program in trace.programs:
            total = sum(times.time(k.signature, kind, "alone").median_us for k in program.kernels)
            whole = recorded["results"][name][place]["programs"][f"{program.name} alone"]["whole_us"]
            assert total / whole == pytest.approx(1.0, abs=0.03)


def test_plans_over_slices_are_weighed_beside_copies_whether_the_model_is_copied_or_placed() -> None:
    times = load_profiles([ROOT / "fixtures/profiles/llama-3-8b-4-layers.profile.arrow"])
    for signature, part, kind in times.rows:
        placed, copied = (times.time(signature, kind, c, part) for c in ("beside", "copies"))
        assert placed == copied
        assert placed.condition == ("alone" if kind == "h200-sxm" else "copies")
        assert ("the same program's iterations" in placed.load) == (kind != "h200-sxm")


def _profiles() -> list[Path]:
    return sorted((ROOT / "fixtures/profiles").glob("*.profile.arrow"))


def test_a_trace_that_fails_is_a_bar_that_does_not_hold(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The benchmark's own command line, with children that end at once."""
    monkeypatch.setattr("sys.argv", ["kernel_times", "--out", str(tmp_path), "--only", "demo"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(kernel_times, "machine_facts", lambda *_, **__: {"device": "none", "driver": "none"})
    monkeypatch.setattr(kernel_times, "_copies", dict)
    started: list[list[str]] = []

    def ended(command: list[str], **options: Any) -> subprocess.Popen[str]:
        started.append(command)
        return popen([sys.executable, "-c", "raise SystemExit(1)"], **options)

    popen = subprocess.Popen
    monkeypatch.setattr(kernel_times.subprocess, "Popen", ended)
    assert kernel_times.main() == 1
    printed = json.loads(capsys.readouterr().out)
    assert [bar["name"] for bar in printed["bars"] if not bar["holds"]] == ["demo: was measured"]
    assert len(started) == 1
    assert "--alone" in started[0]
