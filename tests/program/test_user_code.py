"""Kernels of a user's own file: imported only when trusted, and only while the source is the traced one."""

import hashlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera_core.program.generate import new_memory, shared_buffers
from tessera_core.program.ir import Trace
from tessera_core.program.replay import ProgramRunner
from tessera_core.program.user_code import factory_weights
from tessera_core.program.weights import materialise_weights
from tessera_formats.errors import ArtifactError, ModelError, TrustError

pytest.importorskip("triton")

SOURCE = """
import torch
import triton
import triton.language as tl
from tessera_core.trace.declare import triton_cpu

@triton.jit
def scale_kernel(source, result, factor, elements, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + lanes, mask=lanes < elements)
    tl.store(result + lanes, values * factor, mask=lanes < elements)

def scale_cpu(source, result, factor, elements, BLOCK):
    torch.mul(source, factor, out=result)

{declaration}

class Model:
    def __init__(self):
        self.module = torch.nn.Linear(4, 4)
        self.recipes, self.states, self.feeds = None, (), {{}}

    def make_state(self, request):
        return {{}}

    def make_inputs(self, request):
        return {{"x": torch.ones(request.batch, 4)}}

    def step(self, request, inputs, state):
        hidden = self.module(inputs["x"])
        result = torch.empty_like(hidden)
        scale_kernel[(1,)](hidden, result, 3.0, hidden.numel(), BLOCK=16)
        return {{"y": result}}

    def guards(self, request):
        return ()

def factory(*, dtype, seed):
    torch.manual_seed(seed)
    return Model()
"""
DECLARED = 'triton_cpu(scale_kernel, scale_cpu, reads=("source",), writes=("result",), must=("result",))'


def trace_file(path: Path, declaration: str, source: str = SOURCE) -> Trace:
    from tessera_core.trace.build import trace_model
    from tessera_core.trace.factory import build
    from tessera_core.trace.request import ProgramRequest

    path.write_text(source.format(declaration=declaration))
    try:
        built = build(f"{path}:factory", None, 5, None)
        requests = (ProgramRequest("step", 2, 0),)
        return trace_model(built, requests, seed=5, fake_mode=None, versions={}).trace
    finally:
        sys.modules.pop(path.stem, None)  # replay starts as another process would


def replay(trace: Trace, trusted: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the output as the formula has it."""
    program = trace.programs[0]
    runner = ProgramRunner(trace, program, trusted)
    weights = materialise_weights(trace, shared_buffers(trace, program), trusted=trusted)
    x = torch.randn(2, 4)
    memory = new_memory(trace, program, weights, {"x": x})
    runner(memory)
    views = {w.name: memory.view(w.tensor) for w in trace.weights}
    expected = torch.nn.functional.linear(x, views["weight"], views["bias"]) * 3.0
    return memory.view(program.bindings("output")["y"].tensor), expected


def test_a_trusted_kernel_runs_by_its_declaration(tmp_path: Path) -> None:
    found, expected = replay(trace_file(tmp_path / "declared_model.py", DECLARED), trusted=True)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "decorator",
    [
        '@triton.autotune(configs=[triton.Config({"BLOCK": 16})], key=[])',
        '@triton.heuristics({"BLOCK": lambda _: 16})',
    ],
    ids=["autotune", "heuristics"],
)
def test_a_decorated_kernel_runs_by_its_declaration(tmp_path: Path, decorator: str) -> None:
    """Its module has the decorator's object under the kernel's name, for which the declaration counts, too."""
    path = tmp_path / f"decorated_{decorator[8:12]}.py"
    source = SOURCE.replace("@triton.jit", f"{_doubled(decorator)}\n@triton.jit").replace(", BLOCK=16)", ")")
    found, expected = replay(trace_file(path, DECLARED, source), trusted=True)
    assert torch.equal(found, expected)


def test_only_a_modules_own_kernels_run(tmp_path: Path, one_line: Any) -> None:
    """A forged trace does not reach through a module of ours for what that has imported."""
    path = tmp_path / "reached_model.py"
    trace = trace_file(path, DECLARED)
    program = trace.programs[0]
    for target in ("triton.tessera_core.trace.models.demo_kernels:tl.zeros", "triton.reached_model:tl.zeros"):
        ops = tuple(
            replace(op, target=target) if op.target.startswith("triton.") else op for op in program.ops
        )
        with pytest.raises(ArtifactError) as caught:
            replay(replace(trace, programs=(replace(program, ops=ops),)), trusted=True)
        assert "has no Triton kernel 'tl.zeros'" in one_line(caught)


def _doubled(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


@pytest.mark.slow
def test_an_undeclared_kernel_runs_in_the_interpreter(tmp_path: Path) -> None:
    found, expected = replay(trace_file(tmp_path / "undeclared_model.py", ""), trusted=True)
    assert torch.allclose(found, expected)


def test_nothing_is_imported_without_trust(tmp_path: Path, one_line: Any) -> None:
    path = tmp_path / "distrusted_model.py"
    trace = trace_file(path, DECLARED)
    with pytest.raises(TrustError) as caught:
        replay(trace, trusted=False)
    assert "--trust-model" in one_line(caught)
    assert path.stem not in sys.modules


@pytest.mark.parametrize("fault", ["raise SystemExit(0)", "raise ValueError('no\\n checkpoint')"])
@pytest.mark.parametrize("place", ["at import", "in the factory"])
def test_code_that_fails_later_is_one_line(tmp_path: Path, one_line: Any, fault: str, place: str) -> None:
    path = tmp_path / "later_model.py"
    trace = trace_file(path, DECLARED)
    head, factory, tail = path.read_text().partition("    torch.manual_seed(seed)\n")
    path.write_text(
        f"{fault}\n{head}{factory}{tail}" if place == "at import" else f"{head}    {fault}\n{tail}"
    )
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    trace = replace(trace, info={**trace.info, "factory_hash": digest})
    with pytest.raises(ModelError) as caught:
        factory_weights(trace, ["weight"], trusted=True)
    line = 1 if place == "at import" else 1 + path.read_text().splitlines().index(f"    {fault}")
    what = "SystemExit: 0" if "SystemExit" in fault else "ValueError: no checkpoint"
    assert f"raises {what} at {path}:{line}; correct it" in one_line(caught)
    sys.modules.pop(path.stem, None)


def test_a_changed_source_is_refused(tmp_path: Path, one_line: Any) -> None:
    path = tmp_path / "changed_model.py"
    trace = trace_file(path, DECLARED)
    path.write_text(path.read_text() + "\n# one more line\n")
    with pytest.raises(TrustError) as caught:
        replay(trace, trusted=True)
    assert "changed" in one_line(caught)
    path.unlink()
    with pytest.raises(TrustError):
        replay(trace, trusted=True)


def test_a_kernel_of_another_source_is_refused(tmp_path: Path, one_line: Any) -> None:
    trace = trace_file(tmp_path / "other_model.py", DECLARED)
    program = trace.programs[0]
    ops = tuple(
        replace(op, arguments={**op.arguments, "source_hash": "0" * 64})
        if op.target.startswith("triton")
        else op
        for op in program.ops
    )
    forged = replace(trace, programs=(replace(program, ops=ops),))
    with pytest.raises(TrustError) as caught:
        replay(forged, trusted=True)
    assert "source has changed" in one_line(caught)


@pytest.mark.parametrize(
    "target", ["triton.declared_model:factory", "triton.os:system", "triton.declared_model:missing"]
)
def test_only_kernels_of_that_file_are_called(tmp_path: Path, one_line: Any, target: str) -> None:
    trace = trace_file(tmp_path / "declared_model.py", DECLARED)
    program = trace.programs[0]
    ops = tuple(replace(op, target=target) if op.target.startswith("triton") else op for op in program.ops)
    with pytest.raises(ArtifactError) as caught:
        replay(replace(trace, programs=(replace(program, ops=ops),)), trusted=True)
    assert target in one_line(caught)
