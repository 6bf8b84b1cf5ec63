import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera_core.program.ir import Operand, Program, Trace
from tessera_core.program.store import load_trace, save_trace
from tessera_formats.errors import ModelError, UntracedLaunchError

TracedProgram = Callable[..., tuple[Trace, Program]]
Tensors = dict[str, torch.Tensor]


def targets(program: Program) -> list[str]:
    return [op.target for op in program.ops]


def test_views_leave_no_op_and_layouts_are_exact(traced_program: TracedProgram) -> None:
    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        x = net.embed(inputs["tokens"])  # (2, 1, 16)
        turned = x.reshape(2, 4, 4).transpose(1, 2)[:, 1:, ::2]
        return {"y": turned.neg()}

    trace, program = traced_program(step)
    assert targets(program) == ["aten.embedding.default", "aten.neg.default"]
    view = trace.tensors[program.ops[1].inputs[0]]
    assert view.buffer == trace.tensors[program.ops[0].outputs[0]].buffer
    assert (view.shape, view.stride, view.offset) == ((2, 3, 2), (16, 1, 8), 1)


def test_layers_share_signatures_and_know_their_index(
    traced_program: TracedProgram, toy_step: Callable[..., Tensors]
) -> None:
    _, program = traced_program(toy_step)
    by_layer = {
        n: [k.signature for k in program.kernels if k.layer == n and k.kind in ("matmul", "pointwise")]
        for n in range(3)
    }
    assert len(by_layer[0]) == 3 and len(set(by_layer[0])) == 3
    assert by_layer[0] == by_layer[1] == by_layer[2][:3]
    # A residual sum and the norm after it are one kernel, of which the layers share one too.
    sums = [k.signature for k in program.kernels if k.kind == "reduction" and k.layer in (0, 1)]
    assert len(sums) == 3 and sums[1] == sums[2]
    products = [k for k in program.kernels if k.kind == "matmul" and k.layer is not None]
    assert [k.flops for k in products] == [2 * 2 * 16 * 32] * 6
    assert products[0].name == "layers.first matmul 2x16x32"
    assert products[0].read_bytes == 4 * (2 * 16 + 16 * 32)
    assert products[0].written_bytes == 4 * 2 * 32


def test_state_writers_stand_alone_and_say_what_they_do(
    traced_program: TracedProgram, toy_step: Callable[..., Tensors]
) -> None:
    trace, program = traced_program(toy_step)
    writers = {k.state_writer: k for k in program.kernels if k.kind in ("copy", "counter")}
    found = [(k.kind, k.state_writer, len(k.ops)) for k in program.kernels if k.state_writer != "none"]
    assert found == [("copy", "copy", 1), ("counter", "copy", 1)]
    assert writers["copy"].state_writer == "copy"
    kinds = {b.name: b.kind for b in trace.buffers if b.name}
    assert kinds["cache"] == kinds["position"] == "state"
    assert kinds["tokens"] == "input" and kinds["next_token"] == "output"
    assert kinds["embed.weight"] == "weight" and kinds["scale"] == "constant"


def test_a_recurrence_is_a_computing_writer(traced_program: TracedProgram) -> None:
    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        state["cache"].mul_(0.5)
        return {"y": state["cache"].sum()}

    _, program = traced_program(step)
    assert [k.state_writer for k in program.kernels] == ["compute", "none"]


def test_indexed_copy_says_its_rows_for_this_content_only(traced_program: TracedProgram) -> None:
    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        rows = torch.tensor([2, 3, 6])
        state["cache"].index_copy_(1, rows, torch.ones(2, 3, 16))
        return {"y": state["cache"] + 1}

    _, program = traced_program(step)
    (op,) = [op for op in program.ops if op.target == "aten.index_copy_.default"]
    writes = [operand for operand in op.operands if operand.mode == "write"]
    assert [(w.must, w.valid_for, w.boxes is None) for w in writes] == [
        (False, "shapes", True),
        (False, "content", False),
    ]
    row, batch = 16 * 4, 8 * 16 * 4
    touched = {low for box in writes[1].boxes or () for low, _ in box.intervals()}
    assert touched == {2 * row, batch + 2 * row, 6 * row, batch + 6 * row}
    assert sum(box.bytes for box in writes[1].boxes or ()) == 2 * 3 * row
    kernel = program.kernels[op.kernel]
    assert kernel.written_bytes == 2 * 3 * row


def test_indexed_put_finds_scattered_elements(traced_program: TracedProgram) -> None:
    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        state["cache"][torch.tensor([0, 1]), torch.tensor([1, 5])] = torch.ones(2, 16)
        return {"y": state["cache"] + 1}

    _, program = traced_program(step)
    content = [o for op in program.ops for o in op.operands if o.valid_for == "content"]
    (operand,) = content
    assert sorted(p for b in operand.boxes or () for p in b.intervals()) == [(64, 128), (832, 896)]


def test_must_is_claimed_only_where_all_is_written(traced_program: TracedProgram) -> None:
    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        made = torch.empty(2, 16)
        made.copy_(net.embed(inputs["tokens"])[:, 0])
        made.masked_fill_(made > 0, 0.0)
        state["cache"].add_(1)
        return {"y": made}

    _, program = traced_program(step)
    said: dict[str, list[Operand]] = {op.target: list(op.operands) for op in program.ops}

    def writes(target: str) -> list[bool]:
        return [operand.must for operand in said[target] if operand.mode == "write"]

    assert writes("aten.empty.memory_format") == [False]
    assert writes("aten.copy_.default") == [True]
    assert writes("aten.masked_fill_.Scalar") == [False]
    assert writes("aten.add_.Tensor") == [True]
    assert writes("aten.embedding.default") == [True]
    assert [o.mode for o in said["aten.copy_.default"]] == ["write", "read"]
    assert [o.mode for o in said["aten.add_.Tensor"]] == ["read", "write"]


def test_attention_is_one_portable_op(traced_program: TracedProgram) -> None:
    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        x = net.embed(inputs["tokens"]).reshape(2, 1, 4, 4)
        query = x.expand(2, 2, 4, 4).contiguous()
        return {
            "y": torch.nn.functional.scaled_dot_product_attention(
                query, x, value=x, is_causal=True, enable_gqa=True
            )
        }

    _, program = traced_program(step)
    (op,) = [op for op in program.ops if "attention" in op.target]
    assert op.target == "aten.scaled_dot_product_attention.default"
    assert op.arguments["kwargs"] == {"enable_gqa": True}
    assert [kernel.kind for kernel in program.kernels].count("attention") == 1
    (kernel,) = [kernel for kernel in program.kernels if kernel.kind == "attention"]
    assert kernel.flops == (2 * 2 * 4 * 4) * 2 * (4 + 4) // 2


def test_programs_share_weights_and_constants(tracer: Callable[..., Any], toy_step: Any) -> None:
    trace = tracer(toy_step, batches=(1, 2)).trace
    owners = {b.kind: {x.program for x in trace.buffers if x.kind == b.kind} for b in trace.buffers}
    assert owners["weight"] == owners["constant"] == {None}
    assert owners["state"] == owners["input"] == owners["output"] == {0, 1}
    assert [p.name for p in trace.programs] == ["decode:batch=1,context=8", "decode:batch=2,context=8"]
    names = [weight.name for weight in trace.weights]
    assert len(names) == len(set(names)) == 7


def test_tables_keep_everything(tracer: Callable[..., Any], toy_step: Any, tmp_path: Path) -> None:
    trace = tracer(toy_step, batches=(1, 2)).trace
    save_trace(tmp_path / "t.trace", trace)
    loaded = load_trace(tmp_path / "t.trace")
    for name in ("programs", "buffers", "tensors", "weights", "states", "constants"):
        assert getattr(loaded, name) == getattr(trace, name)


def test_fake_and_real_make_the_same_kernels(tracer: Callable[..., Any], toy_step: Any) -> None:
    real, fake = (tracer(toy_step, fake=fake).trace for fake in (False, True))
    assert [k.signature for k in real.programs[0].kernels] == [k.signature for k in fake.programs[0].kernels]
    assert [op.target for op in real.programs[0].ops] == [op.target for op in fake.programs[0].ops]
    assert {b.kind for b in fake.buffers if not b.real} >= {"weight", "state", "input", "activation"}
    assert fake.constants == real.constants


def test_equal_constants_are_kept_once(traced_program: TracedProgram) -> None:
    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        x = inputs["tokens"] + torch.tensor([[3], [4]])
        return {"y": x * torch.tensor([[3], [4]])}

    trace, _ = traced_program(step)
    constants = [b for b in trace.buffers if b.kind == "constant"]
    assert len(constants) == 1 and constants[0].bytes == 16


def test_an_input_read_on_the_host_becomes_a_guard(traced_program: TracedProgram) -> None:
    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        second = int(inputs["tokens"][1, 0].item())
        return {"y": inputs["tokens"] + second}

    _, program = traced_program(step)
    (guard,) = program.guards
    assert (guard.subject, guard.index, guard.comparison, guard.value) == ("input:tokens", 1, "eq", 1)


def test_a_constant_may_be_read_on_the_host(traced_program: TracedProgram) -> None:
    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        return {"y": inputs["tokens"] + int(torch.arange(5).max())}

    _, program = traced_program(step)
    assert program.guards == ()
    (op,) = [op for op in program.ops if op.target == "aten.add.Tensor"]
    assert op.arguments["args"][1] == 4


def _item_of_state(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
    return {"y": inputs["tokens"] + state["position"].item()}


def _list_of_activation(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
    return {"y": torch.tensor(net.embed(inputs["tokens"]).tolist())}


def _branch_on_activation(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
    return {"y": inputs["tokens"] if net.embed(inputs["tokens"]).sum() > 0 else state["position"]}


def _array_of_activation(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
    return {"y": torch.from_numpy(net.embed(inputs["tokens"]).numpy() + 1)}


def _nonzero(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
    return {"y": inputs["tokens"].nonzero()}


def _mask_select(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
    return {"y": inputs["tokens"][inputs["tokens"] > 0]}


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize(
    ("step", "op"),
    [
        (_item_of_state, "aten._local_scalar_dense.default"),
        (_list_of_activation, "Tensor.tolist"),
        (_branch_on_activation, "aten._local_scalar_dense.default"),
        (_array_of_activation, "Tensor.numpy"),
        (_nonzero, "aten.nonzero.default"),
        (_mask_select, "aten.index.Tensor"),
    ],
)
def test_host_synchronisation_names_op_and_line(
    traced_program: TracedProgram, step: Any, op: str, fake: bool
) -> None:
    with pytest.raises(UntracedLaunchError) as raised:
        traced_program(step, fake)
    line = step.__code__.co_firstlineno + 1
    assert f" at {__file__}:{line}: " in str(raised.value)
    # A fake tensor's list is made element by element.
    assert str(raised.value).startswith(f"{op} at ") or (fake and op == "Tensor.tolist")
    assert "\n" not in str(raised.value)


def _random(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
    return {"y": torch.rand(3)}


def _write_weight(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
    net.embed.weight.add_(1)
    return {"y": net.embed.weight.sum()}


def _write_outside(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
    net.scale.add_(1)
    return {"y": net.scale.sum()}


def _wrong(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
    return {"y": inputs["tokens"] @ net.embed.weight}


def _resize(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
    return {"y": inputs["tokens"].clone().resize_(4)}


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (_random, "aten.rand.default at {place}: draws from the global random generator"),
        (_write_weight, "aten.add_.Tensor at {place}: writes to weight embed.weight"),
        (_write_outside, "aten.add_.Tensor at {place}: writes to constant scale"),
        (_wrong, "RuntimeError: "),
        (_resize, "aten.resize_.default at {place}: changes a tensor's storage"),
    ],
)
def test_what_cannot_be_traced_is_one_line_with_its_place(
    traced_program: TracedProgram, step: Any, says: str
) -> None:
    with pytest.raises(ModelError) as raised:
        traced_program(step)
    place = f"{__file__}:{step.__code__.co_firstlineno + 1}"
    assert says.format(place=place) in str(raised.value)
    assert place in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_tensor_kept_from_an_earlier_program_is_refused(tracer: Callable[..., Any]) -> None:
    kept: list[torch.Tensor] = []

    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        kept.append(net.embed(inputs["tokens"]))
        return {"y": kept[0] + 1}

    with pytest.raises(ModelError, match="earlier program's step left behind"):
        tracer(step, batches=(1, 2))


def test_an_input_may_be_read_whole_only_while_it_is_small(traced_program: TracedProgram) -> None:
    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        return {"y": inputs["tokens"] + len(inputs["tokens"].tolist())}

    _, program = traced_program(step)
    assert [(g.index, g.value) for g in program.guards] == [(0, 0), (1, 1)]
    assert all(math.isfinite(g.value) for g in program.guards)
