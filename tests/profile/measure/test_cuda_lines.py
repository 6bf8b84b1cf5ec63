"""What a user reads when a CUDA measurement cannot be had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tessera_core.devices.cuda import CudaDevice
from tessera_core.profile.measure import cuda
from tessera_core.profile.measure.cuda import CudaMeasurement
from tessera_core.program.ir import Trace
from tessera_core.program.store import load_trace
from tessera_formats.errors import InputError

TRACE = Path(__file__).parents[3] / "fixtures/captures/llama-tiny.trace"
FIRST = CudaDevice(index=0, shares=(96, 36), part=0)


@pytest.fixture(scope="module")
def tiny() -> Trace:
    return load_trace(TRACE)


def _measurement(trace: Trace, beside: CudaDevice | None = None) -> CudaMeasurement:
    return CudaMeasurement(
        trace=trace, path=TRACE, device_type="h200-sxm/sm=96", hardware=FIRST, beside=beside
    )


@pytest.mark.parametrize("beside", [FIRST, CudaDevice(index=0), CudaDevice(index=1, shares=(96, 36), part=1)])
def test_only_another_slice_of_the_cut_runs_beside(tiny: Trace, beside: CudaDevice) -> None:
    with pytest.raises(InputError, match="is no other slice of cuda:0/sm=96"):
        _measurement(tiny, beside).run(lambda text: None)


def test_too_little_memory_is_one_line(tiny: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(device: CudaDevice) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1 GiB")

    monkeypatch.setattr(cuda, "open_lanes", full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (3 << 30, 80 << 30))
    with pytest.raises(InputError, match=r"runs out of the memory of cuda:0 \(3\.0 GiB are free") as problem:
        _measurement(tiny).run(lambda text: None)
    assert "\n" not in str(problem.value)
    assert str(TRACE) in str(problem.value)
