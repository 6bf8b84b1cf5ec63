import re
import struct
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tessera_core.trace.inner import Pointer
from tessera_core.trace.load import import_file
from tessera_core.trace.ptx_targets import check_targets, parameter_block, target_tables
from tessera_core.trace.triton_launch import run_helper
from tessera_formats.errors import InputError, ModelError, UntracedLaunchError

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return import_file(Path(__file__).with_name("toy_kernels.py"), "toy_kernels")


def scaled(kernels: ModuleType) -> Callable[..., Tensors]:
    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        x = net.embed(inputs["tokens"])
        out = torch.empty_like(x)
        kernels.scale[lambda meta: (-(-x.numel() // meta["BLOCK"]),)](
            x, out, x.numel(), 3.0, BLOCK=16, num_warps=2
        )
        row = torch.empty(16)
        kernels.scale[(1,)](x[-1], row, 16, 2.0, BLOCK=16)
        return {"y": out * 2, "row": row}

    return step


def test_a_launch_is_one_op_with_grid_arguments_and_declared_accesses(
    tracer: Callable[..., Any], kernels: ModuleType
) -> None:
    trace = tracer(scaled(kernels)).trace
    program = trace.programs[0]
    op = next(op for op in program.ops if op.target.startswith("triton."))
    assert op.target == "triton.toy_kernels:scale"
    assert op.arguments["grid"] == [2, 1, 1]
    assert op.arguments["args"][2:] == [32, 3.0]
    assert op.arguments["constexprs"] == {"BLOCK": 16}
    assert op.arguments["options"] == {"num_warps": 2}
    said = [(o.tensor, o.mode, o.must, o.evidence) for o in op.operands]
    assert said == [(op.inputs[0], "read", False, "declared"), (op.inputs[1], "write", True, "declared")]
    kernel = program.kernels[op.kernel]
    assert kernel.kind == "triton" and kernel.read_bytes == kernel.written_bytes == 128
    assert [program.ops[i].target for i in kernel.ops] == ["aten.empty_like.default", op.target]


def test_a_kernel_without_declaration_runs_in_the_interpreter(
    tracer: Callable[..., Any], kernels: ModuleType
) -> None:
    seen: list[torch.Tensor] = []

    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        x = net.embed(inputs["tokens"]).reshape(-1)
        out = torch.zeros(32)
        kernels.plain[(2,)](x, out, 20, BLOCK=16)
        seen.extend((x, out))
        return {"y": out * 2}

    trace = tracer(step).trace
    x, out = seen
    assert torch.equal(out[:20], x[:20] + 1) and not out[20:].any()
    op = next(op for op in trace.programs[0].ops if op.target.startswith("triton."))
    modes = [(o.tensor, o.mode, o.must) for o in op.operands]
    assert modes == [(t, mode, False) for t in op.inputs for mode in ("read", "write")]
    assert {o.evidence for o in op.operands} == {"conservative"}
    # Replay has no interpreter, so the trace says that it cannot be run.
    assert trace.info["replayable"] is False
    assert trace.info["notes"] == [
        "not replayable: kernel triton.toy_kernels:plain has no CPU implementation;"
        " declare one with tessera_core.trace.declare.triton_cpu"
    ]


def test_fake_launches_are_recorded_without_running(tracer: Callable[..., Any], kernels: ModuleType) -> None:
    real, fake = (tracer(scaled(kernels), fake=fake).trace for fake in (False, True))
    assert [k.signature for k in real.programs[0].kernels] == [k.signature for k in fake.programs[0].kernels]


def test_a_launch_on_an_unknown_tensor_is_refused(tracer: Callable[..., Any], kernels: ModuleType) -> None:
    outside = torch.zeros(16)

    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        kernels.scale[(1,)](net.embed(inputs["tokens"])[0], outside, 16, 1.0, BLOCK=16)
        return {"y": outside}

    with pytest.raises(UntracedLaunchError, match=r"scale at .*test_triton.py:\d+: argument out"):
        tracer(step)


def test_an_undeclared_change_is_an_error(tracer: Callable[..., Any], kernels: ModuleType) -> None:
    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        out = torch.zeros(1)
        kernels.careless[(1,)](net.embed(inputs["tokens"]), out, 1)
        return {"y": out}

    with pytest.raises(ModelError, match=r"changed x, which the declaration does not list"):
        tracer(step)


def test_an_autotuned_kernel_uses_its_first_configuration(
    tracer: Callable[..., Any], kernels: ModuleType
) -> None:
    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        x = net.embed(inputs["tokens"])
        out = torch.empty_like(x)
        kernels.tuned[lambda meta: (32 // meta["BLOCK"],)](x, out, 32)
        return {"y": out}

    program = tracer(step).trace.programs[0]
    op = next(op for op in program.ops if op.target == "triton.toy_kernels:tuned")
    assert op.arguments["grid"] == [2, 1, 1] and op.arguments["constexprs"] == {"BLOCK": 16}
    assert op.arguments["options"]["num_warps"] == 2


def test_a_configurations_hook_runs_before_its_launch(
    tracer: Callable[..., Any], kernels: ModuleType
) -> None:
    """As on a GPU, where kernels that add into their output rest on it."""
    seen: list[torch.Tensor] = []

    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        x = net.embed(inputs["tokens"])
        out = torch.ones_like(x)
        kernels.added[(1,)](x, out, 32)
        seen[:] = [x, out]
        return {"y": out}

    program = tracer(step).trace.programs[0]
    assert [op.target for op in program.ops][-2:] == ["aten.zero_.default", "triton.toy_kernels:added"]
    assert torch.equal(seen[0], seen[1])


def test_an_autotuned_kernel_is_compiled(tracer: Callable[..., Any], kernels: ModuleType) -> None:
    """By its function: another process finds the tuner under its name."""

    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        x = net.embed(inputs["tokens"])
        out = torch.empty_like(x)
        kernels.tuned[lambda meta: (32 // meta["BLOCK"],)](x, out, 32)
        return {"y": out}

    tables = target_tables(tracer(step), ("sm_90",), lambda message: None)
    assert tables["targets/sm_90/launches"].num_rows == 1


def test_a_warmup_is_refused(tracer: Callable[..., Any], kernels: ModuleType) -> None:
    """It launches nothing, so an op for it would be one too many."""

    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        x = net.embed(inputs["tokens"])
        kernels.scale.warmup(x, torch.empty_like(x), 32, 2.0, BLOCK=64, grid=(1,))
        return {"y": x}

    with pytest.raises(
        UntracedLaunchError, match=r"scale.warmup at .*test_triton.py:\d+: compiles for a GPU"
    ):
        tracer(step)


def test_launches_on_an_ops_own_stream_have_no_rows(tracer: Callable[..., Any], kernels: ModuleType) -> None:
    """Rows of an op's launches are in order, and two streams need not be."""

    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        return {"y": kernels.forked(net.embed(inputs["tokens"]))}

    traced = tracer(step)
    assert traced.launches == ((),)
    (note,) = traced.trace.info["notes"]
    assert "scale on a stream of its own; its declaration" in note


def test_a_custom_op_is_recorded_whole_and_its_inner_launch_noted(
    tracer: Callable[..., Any], kernels: ModuleType
) -> None:
    seen: list[torch.Tensor] = []

    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        x = net.embed(inputs["tokens"])
        seen.extend((x, kernels.doubled(x)))
        return {"y": seen[1]}

    traced = tracer(step)
    op = traced.trace.programs[0].ops[1]
    targets = [op.target for op in traced.trace.programs[0].ops]
    assert targets == ["aten.embedding.default", "tessera_tests.doubled.default"]
    assert [k.kind for k in traced.trace.programs[0].kernels] == ["embedding", "custom"]
    assert torch.equal(seen[0] * 2, seen[1])
    (launch,) = traced.launches[0]
    x, out = (traced.trace.tensors[t] for t in (*op.inputs, *op.outputs))
    assert (launch.op, launch.grid, launch.workspaces) == (1, (1, 1, 1), ())
    assert launch.arguments["x"] == Pointer(dtype="float32", byte_offset=0, buffer=x.buffer)
    assert launch.arguments["out"] == Pointer(dtype="float32", byte_offset=0, buffer=out.buffer)
    assert (launch.arguments["count"], launch.arguments["BLOCK"]) == (32, 64)
    assert traced.trace.info["notes"] == []


def test_launches_of_a_custom_op_point_into_its_tensors_and_its_workspace(
    tracer: Callable[..., Any], kernels: ModuleType
) -> None:
    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        return {"y": kernels.quadrupled(kernels.quadrupled(net.embed(inputs["tokens"])[:, 0]))}

    traced = tracer(step)
    tables = target_tables(traced, ("sm_90",), lambda message: None)
    rows = {name: tables[f"targets/sm_90/{name}"].to_pylist() for name in
            ("launches", "workspaces", "pointers", "launch_edges")}  # fmt: skip
    ops = {op.id: op for op in traced.trace.programs[0].ops if "quadrupled" in op.target}
    assert [(r["op"], r["launch"]) for r in rows["launches"]] == [(o, n) for o in ops for n in (0, 1)]
    # The op's work is all its own: in, temporary; temporary, out. Every call has a temporary of 2 rows of 16 floats.
    assert rows["workspaces"] == [{"workspace": n, "bytes": 128, "scope": "kernel"} for n in (0, 1)]
    assert [(p["launch"], p["offset"], p["workspace"]) for p in rows["pointers"]] == [
        (0, 8, 0), (1, 0, 0), (0, 8, 1), (1, 0, 1),
    ]  # fmt: skip
    assert [(e["source"], e["destination"]) for e in rows["launch_edges"]] == [(0, 1), (0, 1)]
    for first, second in zip(rows["launches"][::2], rows["launches"][1::2]):
        op = ops[first["op"]]
        given, made = (traced.trace.tensors[t].buffer for t in (op.inputs[0], op.outputs[0]))
        assert [(r["offset"], r["buffer"]) for r in first["relocations"]] == [(0, given)]
        assert [(r["offset"], r["buffer"]) for r in second["relocations"]] == [(8, made)]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("prepared", "it also runs aten.mul.Tensor; its declaration"),
        ("outsider", "x of triton.toy_kernels:scale is neither an argument of the op nor made by it"),
    ],
)
def test_an_op_that_does_more_than_launch_has_a_note_and_no_rows(
    tracer: Callable[..., Any], kernels: ModuleType, name: str, why: str
) -> None:
    """What its launches touch is not all that it touches, so they must not stand for it."""
    op = getattr(kernels, name)
    traced = tracer(lambda net, inputs, state: {"y": op(net.embed(inputs["tokens"]))})
    assert traced.launches == ((),)
    (note,) = traced.trace.info["notes"]
    assert note.startswith("launches of triton.toy_kernels:scale inside tessera_tests.") and why in note


def test_launches_work_again_as_before_after_tracing(tracer: Callable[..., Any], kernels: ModuleType) -> None:
    from triton.runtime.jit import JITFunction

    before = JITFunction.run
    with pytest.raises(ModelError):
        tracer(lambda net, inputs, state: 1 / 0)
    tracer(scaled(kernels))
    assert JITFunction.run is before


def test_declarations_name_parameters(kernels: ModuleType) -> None:
    from tessera_core.trace.declare import triton_cpu

    with pytest.raises(ValueError, match="'z' is no parameter"):
        triton_cpu(kernels.plain, lambda: None, reads=("z",))
    with pytest.raises(ValueError, match="which writes lacks"):
        triton_cpu(kernels.plain, lambda: None, writes=("out",), must=("x",))


def test_specialisations_are_compiled_to_ptx_that_knows_no_paths(
    tracer: Callable[..., Any], kernels: ModuleType
) -> None:
    traced = tracer(scaled(kernels), batches=(1, 2))
    tables = target_tables(traced, ("sm_90",), lambda message: None)
    launches = tables["targets/sm_90/launches"].to_pylist()
    modules = {row["module"]: row for row in tables["targets/sm_90/modules"].to_pylist()}
    assert len(launches) == 4
    for row in launches:
        text = modules[row["module"]]["text"]
        entry = re.search(r"\.entry (\w+)\((.*?)\)", text, re.DOTALL)
        assert entry is not None and entry[1] == row["function"]
        # Two pointers, then count (a constant where it is 1), factor, and two hidden pointers.
        assert entry[2].count(".param") == 6
        count, factor = struct.unpack_from("<if", row["parameters"], 16)
        assert (row["parameters"][:16], row["parameters"][24:]) == (bytes(16), bytes(16))
        assert (count, factor) in ((16, 3.0), (32, 3.0), (16, 2.0))
        assert [r["offset"] for r in row["relocations"]] == [0, 8]
        assert "toy_kernels" not in text and ".loc" not in text and ".file" not in text
    blocks = {tuple(row["block"]) for row in launches}
    assert blocks == {(64, 1, 1), (128, 1, 1)}
    second = launches[-1]
    tensor = traced.trace.tensors[traced.trace.programs[1].ops[second["op"]].inputs[0]]
    assert second["relocations"][0] == {"offset": 0, "buffer": tensor.buffer, "byte_offset": 64}


def test_parameters_are_aligned_and_pointers_relocated() -> None:
    x = Pointer(dtype="float32", byte_offset=12, buffer=7)
    scratch = Pointer(dtype="float32", byte_offset=4, workspace=2)
    signature = {"a": "i32", "x": "*fp32", "t": "*fp32", "BLOCK": "constexpr", "b": "i64", "c": "fp32"}
    block, relocations, inner = parameter_block(
        signature, {"a": -2, "x": x, "t": scratch, "BLOCK": 8, "b": 1 << 40, "c": 1.5}, "triton.m:k"
    )
    assert struct.unpack("<i4xQQqf4xQQ", block) == (-2, 0, 0, 1 << 40, 1.5, 0, 0)
    assert relocations == [{"offset": 8, "buffer": 7, "byte_offset": 12}]
    assert inner == [{"offset": 16, "workspace": 2, "byte_offset": 4}]


@pytest.mark.parametrize("kind", ["tensordesc<fp16[16]>", ("*fp32", "i32")])
def test_a_parameter_without_a_known_place_is_refused(kind: Any) -> None:
    with pytest.raises(UntracedLaunchError, match=r"triton.m:k: parameter x has type"):
        parameter_block({"x": kind}, {"x": 1}, "triton.m:k")


def test_a_helper_that_takes_too_long_is_one_line() -> None:
    with pytest.raises(UntracedLaunchError, match=r"triton.m:k: .* in 0.05 s; shrink it"):
        run_helper("tessera_core.trace.interpret", {}, "triton.m:k", {}, "shrink it", 0.05)


def test_a_kernel_that_does_not_compile_is_one_line(tracer: Callable[..., Any], kernels: ModuleType) -> None:
    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        out = torch.empty(16)
        kernels.broken[(1,)](net.embed(inputs["tokens"])[0], out, BLOCK=16)
        return {"y": out}

    with pytest.raises(UntracedLaunchError, match=r"toy_kernels:broken.*leave out --ptx-target") as raised:
        target_tables(tracer(step), ("sm_90",), lambda message: None)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("target", ["sm90", "sm_9", "sm_70", "sm_95", "gfx942", ""])
def test_an_unknown_ptx_target_is_refused(target: str) -> None:
    with pytest.raises(InputError, match=r"choose among sm_75, sm_80"):
        check_targets((target,))
