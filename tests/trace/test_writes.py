"""Writes: those that a schema leaves unsaid, those through views with a bit, and those that only move values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import batch_norm

from tessera_core.program import operators
from tessera_core.program.generate import new_memory, shared_buffers
from tessera_core.program.ir import Program, Trace
from tessera_core.program.replay import run_program
from tessera_core.program.weights import materialise_weights
from tessera_core.trace.operators import is_copy_like
from tessera_formats.errors import ModelError
from tests.trace.conftest import Net

TracedProgram = Callable[..., tuple[Trace, Program]]
Tensors = dict[str, torch.Tensor]


@torch.library.custom_op("tessera_tests::lying", mutates_args=())
def lying(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(y)
    return x * 2


@lying.register_fake
def _(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("tessera_tests::outside", mutates_args=("x",))
def outside(x: torch.Tensor) -> None:
    x.as_strided((1,), (1,), x.storage_offset() + x.numel()).fill_(3.0)


def replayed(traced: tuple[Trace, Program]) -> dict[str, torch.Tensor]:
    """Outputs of one replay, with the weights that the toy was traced with."""
    trace, program = traced
    torch.manual_seed(0)
    parameters = dict(Net().named_parameters())
    shared = {w.buffer: parameters[w.name].detach().untyped_storage() for w in trace.weights}
    rest = [buffer for buffer in shared_buffers(trace, program) if buffer not in shared]
    memory = new_memory(
        trace, program, shared | materialise_weights(trace, rest), {"tokens": torch.tensor([[0], [1]])}
    )
    run_program(trace, program, memory)
    return {name: memory.view(binding.tensor) for name, binding in program.bindings("output").items()}


@pytest.mark.parametrize("fake", [False, True])
def test_running_statistics_are_written_in_training_only(traced_program: TracedProgram, fake: bool) -> None:
    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        x = net.embed(inputs["tokens"])[:, 0]
        mean, variance = state["cache"][0, 0], state["cache"][0, 1]
        quiet = batch_norm(x, mean, variance, training=False)
        return {"y": quiet + batch_norm(x, mean, variance, training=True)}

    _, program = traced_program(step, fake)
    still, moving = [op for op in program.ops if "batch_norm" in op.target]
    assert [program.kernels[op.kernel].state_writer for op in (still, moving)] == ["none", "compute"]
    written = {operand.tensor for operand in moving.operands if operand.mode == "write"}
    assert written == {*moving.inputs[1:3], *moving.outputs} and len(written) == 5


def test_running_statistics_that_are_weights_are_refused(traced_program: TracedProgram) -> None:
    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        x = net.embed(inputs["tokens"])[:, 0]
        return {"y": batch_norm(x, net.embed.weight[0], net.embed.weight[1], training=True)}

    with pytest.raises(ModelError, match=r"native_batch_norm.*writes to weight embed.weight"):
        traced_program(step)


def test_a_custom_op_that_hides_a_write_is_refused(traced_program: TracedProgram) -> None:
    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        return {"y": torch.ops.tessera_tests.lying(state["cache"], torch.ones(1))}

    with pytest.raises(ModelError, match=r"lying.default at .*test_writes.py:\d+: changes an argument"):
        traced_program(step)


def test_a_custom_op_that_writes_past_its_argument_is_refused(traced_program: TracedProgram) -> None:
    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        torch.ops.tessera_tests.outside(state["cache"][0, 0])
        return {"y": inputs["tokens"] + 1}

    with pytest.raises(ModelError, match=r"outside.default at .*changes an argument"):
        traced_program(step)


def _complex(net: Any, inputs: Tensors) -> torch.Tensor:
    x: torch.Tensor = net.embed(inputs["tokens"])[:, 0]
    return torch.view_as_complex(x.reshape(2, 8, 2))


def _product(z: torch.Tensor) -> torch.Tensor:
    return z * z.conj()


def _matrix_product(z: torch.Tensor) -> torch.Tensor:
    return z @ z.mH


def _imaginary_part(z: torch.Tensor) -> torch.Tensor:
    return z.conj().imag + 1


def _returned(z: torch.Tensor) -> torch.Tensor:
    return z.conj().imag


def _copied(z: torch.Tensor) -> torch.Tensor:
    return torch.zeros(2, 8, dtype=torch.complex64).copy_(z.conj())


def _both_bits(z: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(z.conj()).t().clone()


@pytest.mark.parametrize(
    "form", [_product, _matrix_product, _imaginary_part, _returned, _copied, _both_bits, torch.resolve_conj]
)
@pytest.mark.parametrize("fake", [False, True])
def test_conjugate_and_negative_views_are_applied(
    traced_program: TracedProgram, form: Callable[[torch.Tensor], torch.Tensor], fake: bool
) -> None:
    seen: list[torch.Tensor] = []

    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        z = _complex(net, inputs)
        y = form(z.conj() if form is torch.resolve_conj else z)
        seen.append(y.resolve_conj().resolve_neg())
        return {"y": y}

    trace, program = traced_program(step, fake)
    if fake:
        assert {"aten._conj_physical.default", "aten.neg.default"} & {op.target for op in program.ops}
    else:
        torch.testing.assert_close(replayed((trace, program))["y"], seen[0])


def test_a_write_through_a_conjugate_view_is_refused(traced_program: TracedProgram) -> None:
    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        z = _complex(net, inputs)
        z.conj().add_(2.0)
        return {"y": torch.view_as_real(z)}

    with pytest.raises(ModelError, match=r"aten.* at .*test_writes.py:\d+: works in place on a conj"):
        traced_program(step)


def test_lists_are_written_in_place_and_replay(traced_program: TracedProgram) -> None:
    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        several = [inputs["tokens"] + 1, inputs["tokens"] + 2]
        torch._foreach_add_(several, 10)
        return {"a": several[0], "b": several[1]}

    found = replayed(traced_program(step))
    assert (found["a"].tolist(), found["b"].tolist()) == ([[11], [12]], [[12], [13]])


def test_an_operator_that_replay_refuses_is_refused(
    traced_program: TracedProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every operator with a text that is no mode of arithmetic is refused; here no text is.
    monkeypatch.setattr(operators, "_TEXT_ARGUMENTS", frozenset())

    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        return {"y": torch.nn.functional.gelu(net.embed(inputs["tokens"]))}

    with pytest.raises(ModelError, match=r"aten.gelu.default at .*test_writes.py:\d+: cannot be replayed"):
        traced_program(step)


def test_equal_views_are_one_tensor_as_in_replay(traced_program: TracedProgram) -> None:
    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        x = torch.complex(state["cache"], state["cache"])
        # Two views of the same elements: one tensor in replay.
        x.real.scatter_reduce_(0, torch.zeros(2, 8, 16, dtype=torch.int64), x.real, "sum")
        return {"y": x}

    with pytest.raises(ModelError, match=r"test_writes.py:\d+; correct it"):
        traced_program(step)


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "copies"),
    [
        ("aten.index_put_.default", [0, [1], 2], {}, True),
        ("aten.index_put_.default", [0, [1], 2, False], {}, True),
        ("aten.index_put_.default", [0, [1], 2, True], {}, False),
        ("aten.index_put_.default", [0, [1], 2], {"accumulate": True}, False),
        ("aten.scatter_.src", [0, 1, 2, 3], {}, True),
        ("aten.scatter_.reduce", [0, 1, 2, 3], {"reduce": "add"}, False),
        ("aten.scatter_.value_reduce", [0, 1, 2, 3], {"reduce": "multiply"}, False),
        ("aten.add_.Tensor", [0, 1], {}, False),
    ],
)
def test_a_copy_that_accumulates_computes(target: str, args: Any, kwargs: Any, copies: bool) -> None:
    assert is_copy_like(target, {"args": args, "kwargs": kwargs}) is copies


def test_an_accumulating_put_reads_what_was_there(traced_program: TracedProgram) -> None:
    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        rows = torch.tensor([0, 0])
        state["cache"].index_put_((rows,), torch.ones(2, 8, 16), accumulate=True)
        return {"y": inputs["tokens"] + 1}

    _, program = traced_program(step)
    op = next(op for op in program.ops if "index_put" in op.target)
    assert {o.mode for o in op.operands if o.tensor == op.inputs[0]} == {"read", "write"}
    assert program.kernels[op.kernel].state_writer == "compute"
