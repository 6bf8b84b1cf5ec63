"""Capture on a CUDA device: stored launches give the groups' bits, and foreign launches are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera_core.program.store import load_trace
from tessera_core.trace.capture.reconcile import reconcile_model
from tessera_core.trace.capture.stage import CaptureStage
from tessera_core.trace.request import ProgramRequest
from tessera_core.trace.stage import TraceStage
from tessera_formats.errors import UntracedLaunchError
from tessera_formats.trace import read_trace

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
def test_stored_launches_give_what_the_groups_give(compiled: bool, tmp_path: Path) -> None:
    from benchmarks.capture import compare, memory_of, rebuilt, results_of, run_groups, values

    path = tmp_path / "demo.trace"
    TraceStage(model="demo", programs=(ProgramRequest("decode", 2, 16),)).run(path)
    stage = CaptureStage(device=DEVICE, compiled=compiled)
    trace = load_trace(path)
    target, tables, session, _ = stage.capture(trace)
    assert target.endswith("-eager") is not compiled
    rows = {name: table.to_pylist() for name, table in tables.items()}
    program = trace.programs[0]
    assert {r["kernel"] for r in rows["launches"]} == {k.id for k in program.kernels}
    native = [r for r in rows["launches"] if program.kernels[r["kernel"]].kind == "triton"]
    assert native and all(r["module"] is not None and r["op"] is not None for r in native)
    given = values(trace, program)
    wanted = memory_of(trace, given)
    run_groups(session, program, wanted)
    built = rebuilt(trace, program, rows, dict(session.handles), given)
    assert compare(results_of(trace, program, built), results_of(trace, program, wanted))["equal"]


def test_a_target_is_added_to_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "demo.trace"
    TraceStage(model="demo", programs=(ProgramRequest("decode", 1, 8),), fake=True).run(path)
    digest = read_trace(path).info["program_digest"]
    facts = CaptureStage(device=DEVICE).run(path, path)
    bundle = read_trace(path)
    bundle.check()
    assert bundle.targets() == (facts.values["target"],) and bundle.info["program_digest"] == digest
    # Also in a process that has captured before: every kernel that the compiler wrote comes with its PTX.
    launches = bundle.table(f"targets/{facts.values['target']}/launches").to_pylist()
    assert all(r["module"] is not None for r in launches if r["function"].startswith("triton_"))
    assert facts.values["ptx_share"] > 0.3
    assert facts.values["reads_out_of_reach"] == 0 and facts.values["reconciliation"] == "done"


def test_user_code_on_two_streams_is_captured_and_reconciled(tmp_path: Path) -> None:
    """Its custom op launches Triton kernels of its own, on the side stream."""
    path = tmp_path / "two.trace"
    factory = Path(__file__).parents[3] / "benchmarks" / "two_streams.py"
    TraceStage(model=f"{factory}:factory", programs=(ProgramRequest("decode", 4, 64),)).run(path)
    facts = CaptureStage(device=DEVICE, trusted=True).run(path, path)
    assert facts.values["reconciliation"] == "done" and facts.values["reads_out_of_reach"] == 0
    bundle = read_trace(path)
    launches = bundle.table(f"targets/{facts.values['target']}/launches").to_pylist()
    hidden = {r["function"]: r["module"] for r in launches if r["function"] in ("square_sums", "scale_rows")}
    assert set(hidden) == {"square_sums", "scale_rows"} and all(hidden.values())
    assert bundle.table(f"targets/{facts.values['target']}/pointers").num_rows >= 2


def test_launches_behind_the_dispatchers_back_are_refused(tracer: Callable[..., Any]) -> None:
    from cuda.bindings import driver

    def step(net: Any, inputs: Any, state: Any) -> dict[str, torch.Tensor]:
        x = net.embed(inputs["tokens"])
        if x.is_cuda:
            stream = torch.cuda.current_stream().cuda_stream
            driver.cuMemsetD32Async(x.data_ptr(), 0, 4, driver.CUstream(stream))
        return {"y": x * 2}

    refused(tracer, step, "memset: no operator call made it")


def test_operators_that_the_trace_lacks_are_refused(tracer: Callable[..., Any]) -> None:
    def step(net: Any, inputs: Any, state: Any) -> dict[str, torch.Tensor]:
        x = net.embed(inputs["tokens"])
        return {"y": x.erf() if x.is_cuda else x * 2}

    refused(tracer, step, "aten.erf.default made it, which the trace does not record")


def refused(tracer: Callable[..., Any], step: Callable[..., Any], says: str) -> None:
    from tests.trace.conftest import ToyModel

    trace = tracer(step).trace
    model = ToyModel(step)
    model.module.to(DEVICE)
    with pytest.raises(UntracedLaunchError, match=says):
        reconcile_model(trace, model, DEVICE)
