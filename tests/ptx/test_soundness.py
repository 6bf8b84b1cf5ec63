"""The analysis against the recorded oracles: never a byte missed, never a false sure write. Quickly on the first launch
of every kernel; slowly on every launch of every module, and the record itself is observed anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

from benchmarks.ptx_soundness import SECONDS_LIMIT, Tally, compare, limited, shape_of
from fixtures.ptx import archive
from fixtures.ptx.archive import MODES, StoredLaunch
from tessera_core.ptx.analysis import LaunchAnalysis, analyse_launch
from tessera_core.ptx.parser import parse_module
from tessera_core.ptx.syntax import Module
from tests.ptx.oracle.machine import observe

QUICK_BUILDS = ("sm_90", "nvcc.sm_90a")
EMULATED_BUILDS = (
    "sm_80",
    "nvcc.sm_80",
    "nvcc.sm_90a",
    "nvcc.sm_100a",
    "nvcc.sm_100a.O0",
    "nvcc.sm_90a.debug",
)
ROOT = Path(__file__).resolve().parents[2]


def build_of(launch: StoredLaunch) -> str:
    return launch.module.partition(".")[2]


@lru_cache(maxsize=4)
def parsed(name: str) -> Module:
    return parse_module(archive.modules()[name].text, name)


def analysed(launch: StoredLaunch) -> LaunchAnalysis:
    with limited(SECONDS_LIMIT):
        return analyse_launch(parsed(launch.module), shape_of(launch), launch.sizes())


def recorded(launch: StoredLaunch) -> dict[str, dict[int, list[int]]]:
    """What the oracle saw, buffers by number."""
    numbers = {name: index for index, name in enumerate(launch.buffers)}
    seen = archive.observed()[launch.kernel][launch.launch]
    return {mode: {numbers[name]: runs for name, runs in seen[mode].items()} for mode in MODES}


def judged(launch: StoredLaunch) -> Tally:
    tally = Tally()
    sizes = {b: size for b, size in launch.sizes().items() if list(launch.buffers)[b] != "scratch"}
    compare(
        tally, f"{launch.module} {launch.entry} {launch.launch}", analysed(launch), sizes, recorded(launch)
    )
    return tally


QUICK = [launch for launch in archive.launches() if launch.launch == 0 and build_of(launch) in QUICK_BUILDS]


@pytest.mark.parametrize("launch", QUICK, ids=lambda launch: str(launch.kernel))
def test_no_byte_is_missed_and_no_write_is_falsely_sure(launch: StoredLaunch) -> None:
    tally = judged(launch)
    assert not tally.missed
    assert not tally.false_must


def test_most_triton_kernels_are_exact() -> None:
    plain = [
        x
        for x in QUICK
        if x.triton and not x.data_dependent and not x.descriptors and "scratch" not in x.buffers
    ]
    unequal = [launch.kernel for launch in plain if not judged(launch).equal]
    assert len(unequal) <= 0.03 * len(plain), unequal


@pytest.mark.slow
@pytest.mark.parametrize("build", sorted({build_of(launch) for launch in archive.launches()}))
def test_every_launch_of_a_build(build: str) -> None:
    tallies = [judged(launch) for launch in archive.launches() if build_of(launch) == build]
    assert not [what for tally in tallies for what in (*tally.missed, *tally.false_must)]


@pytest.mark.slow
@pytest.mark.parametrize("build", EMULATED_BUILDS)
def test_the_emulator_sees_what_is_recorded(build: str) -> None:
    """On the PTX of one build: what Triton's interpreter saw of the source, what the emulator saw of another build."""
    for launch in archive.launches():
        if build_of(launch) == build:
            assert observe(archive.modules()[launch.module].text, launch, archive.contents) == recorded(
                launch
            ), launch


@pytest.mark.slow
def test_the_interpreter_sees_what_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "seen.json"
    command = [sys.executable, "-W", "ignore", "fixtures/ptx/suite/observe_triton.py", str(path)]
    subprocess.run(
        command, check=True, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True
    )
    for kernel, launches in json.loads(path.read_text()).items():
        stored = [{mode: seen[mode] for mode in MODES} for seen in archive.observed()[kernel]]
        assert launches == stored, kernel
