"""Measuring on a real GPU: rows, sums, slices beside each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tessera_core.devices.cuda import CudaDevice, multiprocessors_of
from tessera_core.profile.measure.cuda import CudaMeasurement
from tessera_core.program.store import load_trace

pytestmark = pytest.mark.gpu

TRACE = Path(__file__).parents[3] / "fixtures/captures/llama-tiny.trace"


def test_a_whole_gpu_is_measured() -> None:
    trace = load_trace(TRACE)
    found = CudaMeasurement(
        trace=trace, path=TRACE, device_type="here", hardware=CudaDevice(index=0), seconds=2.0
    ).run(lambda text: None)
    assert {row.signature for row in found.rows} == {k.signature for p in trace.programs for k in p.kernels}
    assert not found.unmeasured
    assert all(0 < row.low_us <= row.median_us <= row.high_us for row in found.rows)
    times = {row.signature: row.median_us for row in found.rows}
    for program in trace.programs:
        total = sum(times[kernel.signature] for kernel in program.kernels)
        whole = found.whole[program.id, "alone"].median_us
        assert 0.8 < total / whole < 1.25  # a tiny model's kernels are mostly launch time


def test_a_slice_is_slower_and_slowed_by_the_other() -> None:
    total = multiprocessors_of(0)
    first = total * 3 // 4 // 8 * 8
    shares = (first, total - first)
    trace = load_trace(TRACE)
    found = CudaMeasurement(
        trace=trace,
        path=TRACE,
        device_type="here",
        hardware=CudaDevice(index=0, shares=shares, part=1),
        beside=CudaDevice(index=0, shares=shares, part=0),
        seconds=2.0,
    ).run(lambda text: None)
    assert {row.condition for row in found.rows} == {"alone", "copies"}
    assert all("#0" in row.load for row in found.rows if row.condition == "copies")
    assert all("#1" in row.hardware for row in found.rows)
    torch.cuda.empty_cache()
