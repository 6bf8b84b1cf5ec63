"""Real recordings from an H200, with and without their ExecutionTrace, from trace to report."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tessera_core.deps.graph import load_deps
from tessera_core.program.ir import Trace
from tessera_core.program.store import load_trace
from tests.trace.inputs.conftest import CLUSTER, FIXTURES, line, ok


def recording(name: str) -> tuple[Path, Path]:
    return FIXTURES / f"{name}.kineto.json.gz", FIXTURES / f"{name}.et.json.gz"


@pytest.mark.parametrize("storages", [False, True])
def test_pipeline_of_a_recorded_decode_step(tmp_path: Path, tessera: Callable, storages: bool) -> None:
    kineto, execution = recording("llama-3-8b-4-layers")
    (tmp_path / "c.toml").write_text(CLUSTER.format("h200-sxm", "l40s"))
    more = ("--execution-trace", execution) if storages else ()
    ok(tessera("trace", kineto, *more, "--program", "decode:batch=8,context=1024", "-o", "x.trace"))
    ok(tessera("ptx-deps", "x.trace", "-o", "x.deps"))
    ok(tessera("profile", "x.trace", "--device", "h200-sxm", "--device", "l40s", "-o", "x.profile.arrow"))
    plan = ("--cluster", "c.toml", "--policy", "throughput", "-o", "x.plan.toml")
    ok(tessera("partition", "x.trace", "x.deps", "x.profile.arrow", *plan))
    run = ("run", "x.plan.toml", "--trace", "x.trace", "--deps", "x.deps", "-o", "x.run")
    assert json.loads(ok(tessera(*run, "--backend", "simulate", "--json")))["status"] == "finished"
    ok(tessera("inspect", "x.run"))
    assert "not replayable: a profile has times but no values" in line(tessera(*run))


def test_storages_tell_the_weights_and_the_state_that_the_model_has(
    tmp_path: Path, tessera: Callable
) -> None:
    """The oracle is the tracer itself, on the same model, which shares nothing with the reading of recordings."""
    pytest.importorskip("transformers")
    kineto, execution = recording("llama-tiny")
    ok(tessera("trace", kineto, "--execution-trace", execution, "-o", "r.trace"))
    ok(tessera("trace", "llama-tiny", "--program", "decode:batch=4,context=64", "--fake", "-o", "m.trace"))
    recorded, model = load_trace(tmp_path / "r.trace"), load_trace(tmp_path / "m.trace")

    def weights(trace: Trace) -> list[int]:
        used = {trace.tensors[o.tensor].buffer for op in trace.programs[0].ops for o in op.operands}
        return sorted(trace.buffers[weight.buffer].bytes for weight in trace.weights if weight.buffer in used)

    assert weights(recorded) == weights(model)
    caches = [b.bytes for b in model.buffers if b.kind == "state" and b.bytes > 8]
    assert sorted(b.bytes for b in recorded.buffers if b.kind == "state")[-len(caches) :] == sorted(caches)
    products = [
        sorted(k.flops for k in t.programs[0].kernels if k.kind == "matmul") for t in (recorded, model)
    ]
    assert products[0] == products[1]


def test_two_streams_are_independent_where_the_storages_say_so(tmp_path: Path, tessera: Callable) -> None:
    kineto, execution = recording("two-streams")
    ok(tessera("trace", kineto, "--execution-trace", execution, "-o", "x.trace"))
    ok(tessera("ptx-deps", "x.trace", "-o", "x.deps"))
    trace = load_trace(tmp_path / "x.trace")
    names = [kernel.name.split()[0] for kernel in trace.programs[0].kernels]
    assert names == ["mm", "mm", "fill", "add", "add", "copy"]
    raw = {(e.source, e.destination) for e in load_deps(tmp_path / "x.deps").edges(0) if e.hazard == "RAW"}
    assert raw == {(0, 3), (1, 3), (2, 4), (3, 4)}
    kinds = {b.kind for b in trace.buffers}
    assert kinds == {"weight", "state", "activation"}, "what is added to is state, what is only read a weight"


def test_compiled_kernels_without_a_schema_are_conservative(tmp_path: Path, tessera: Callable) -> None:
    kineto, execution = recording("compiled")
    ok(tessera("trace", kineto, "--execution-trace", execution, "-o", "x.trace"))
    (program,) = load_trace(tmp_path / "x.trace").programs
    triton = [op for op in program.ops if op.target.startswith("annotation.triton_")]
    assert len(triton) == 4
    assert {operand.evidence for op in triton for operand in op.operands} == {"conservative"}
    assert [len(k.ops) for k in program.kernels] == [1] * 10


def test_a_cuda_graph_hides_the_calls(tmp_path: Path, tessera: Callable) -> None:
    kineto, execution = recording("graphed")
    ok(tessera("trace", kineto, "--execution-trace", execution, "-o", "x.trace"))
    trace = load_trace(tmp_path / "x.trace")
    assert any("says nothing of 9 of 9 kernels" in note for note in trace.info["notes"])
    assert len(trace.programs[0].kernels) == 9


def test_an_execution_trace_of_another_run(tmp_path: Path, tessera: Callable) -> None:
    kineto, execution = recording("two-streams")
    other = recording("llama-tiny")[1]
    said = line(tessera("trace", kineto, "--execution-trace", other, "-o", "x.trace"))
    assert "was not recorded together with" in said
    assert "is no ExecutionTrace" in line(
        tessera("trace", kineto, "--execution-trace", kineto, "-o", "x.trace")
    )
    content = gzip.decompress(execution.read_bytes())
    (tmp_path / "half.json").write_bytes(content[: len(content) // 2])
    assert "ends in the middle" in line(
        tessera("trace", kineto, "--execution-trace", "half.json", "-o", "x.trace")
    )
    (tmp_path / "odd.json").write_bytes(content.replace(b'"Tensor(float)"', b'"Tensor(odd)"'))
    assert "unknown dtype odd" in line(
        tessera("trace", kineto, "--execution-trace", "odd.json", "-o", "x.trace")
    )


def test_an_execution_trace_of_the_same_model_at_another_size(tmp_path: Path, tessera: Callable) -> None:
    """Record numbers and names agree, so only the shapes can tell."""
    kineto, execution = recording("two-streams")
    content = gzip.decompress(execution.read_bytes()).replace(b"[2048,2048]", b"[1024,2048]")
    assert b"[1024,2048]" in content
    (tmp_path / "other.json").write_bytes(content)
    said = line(tessera("trace", kineto, "--execution-trace", "other.json", "-o", "x.trace"))
    assert "was given float32[1024,2048]" in said and "not float32[2048,2048]" in said
