"""Kernels as functions of tensors: the same bits as replay, and views that a compiler can see through."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tessera_core.program.ir import Trace
from tessera_core.program.memory import Memory
from tessera_core.program.replay import KernelRunner, local_buffers
from tessera_core.trace.capture.group import build_group, kernel_group, store_results
from tessera_core.trace.capture.views import view_steps
from tessera_formats.errors import ArtifactError


@given(st.data())
def test_steps_give_exactly_the_view(data: st.DataObject) -> None:
    """Any chain of views of a dense base is found again, element by element, or refused."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    count = torch.Size(shape).numel()
    base = torch.arange(count).reshape(shape)
    base = base.permute(data.draw(st.permutations(range(len(shape)))))
    view = base
    for _ in range(data.draw(st.integers(0, 3))):
        kind = data.draw(st.sampled_from(["slice", "permute", "unsqueeze", "expand", "select", "step"]))
        if kind == "permute":
            view = view.permute(data.draw(st.permutations(range(view.dim()))))
        elif kind == "unsqueeze":
            view = view.unsqueeze(data.draw(st.integers(0, view.dim())))
        elif kind == "expand":
            view = view.unsqueeze(0).expand(3, *view.shape)
        elif view.dim():
            axis = data.draw(st.integers(0, view.dim() - 1))
            start = data.draw(st.integers(0, view.shape[axis] - 1))
            if kind == "slice":
                view = view.narrow(axis, start, data.draw(st.integers(1, view.shape[axis] - start)))
            elif kind == "select":
                view = view.select(axis, start)
            else:
                view = view[(slice(None),) * axis + (slice(start, None, 2),)]
    steps = view_steps(base.shape, base.stride(), view.shape, view.stride(), view.storage_offset())
    if steps is None:
        return
    found = base
    for name, arguments in steps:
        packet, overload = name.split(".")
        found = getattr(getattr(torch.ops.aten, packet), overload)(found, *arguments)
    assert torch.equal(found, view)
    assert found.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("shape", "stride", "offset"),
    [((4, 2), (2, 2), 0), ((3,), (3,), 0), ((5,), (1,), 4), ((2, 3), (4, 1), 3)],
    ids=["overlapping", "stride that divides nothing", "past a row", "wrapping a row"],
)
def test_other_views_are_refused(shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> None:
    assert view_steps((2, 4), (4, 1), shape, stride, offset) is None


def test_a_base_with_gaps_is_refused() -> None:
    assert view_steps((2, 4), (8, 1), (2,), (8,), 0) is None


def bound(trace: Trace, values: dict[int, bytes]) -> Memory:
    memory = Memory(trace)
    for buffer, content in values.items():
        flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        memory.bind(buffer, flat.untyped_storage())
    return memory


def given_values(trace: Trace) -> dict[int, bytes]:
    """Bytes of everything that exists before the iteration: floats of small numbers, integers zero."""
    values = {}
    for buffer in trace.buffers:
        if buffer.kind in ("weight", "constant", "input", "state"):
            dtypes = {t.dtype for t in trace.tensors if t.buffer == buffer.id}
            if dtypes == {"float32"}:
                generator = torch.Generator().manual_seed(buffer.id)
                values[buffer.id] = torch.randn(buffer.bytes // 4, generator=generator).numpy().tobytes()
            else:
                values[buffer.id] = bytes(buffer.bytes)
    return values


def test_groups_give_what_replay_gives(tracer: Callable[..., Any], toy_step: Callable[..., Any]) -> None:
    trace = tracer(toy_step).trace
    program = trace.programs[0]
    local = local_buffers(trace, program)
    values = given_values(trace)
    replayed, grouped = bound(trace, values), bound(trace, values)
    for kernel in program.kernels:
        KernelRunner(trace, program, kernel.id)(replayed)
        group = kernel_group(trace, program, kernel.id, local=local[kernel.id], device="cpu")
        assert "as_strided" not in group.function.code
        store_results(group, grouped, group.function(*group.arguments(grouped)))
    for binding in program.io:
        assert torch.equal(replayed.view(binding.tensor), grouped.view(binding.tensor)), binding.name


def test_a_whole_program_is_a_function_too(tracer: Callable[..., Any], toy_step: Callable[..., Any]) -> None:
    trace = tracer(toy_step).trace
    program = trace.programs[0]
    kept = {trace.tensors[binding.tensor].buffer for binding in program.io}
    local = {b.id for b in trace.buffers if b.id not in kept}
    group = build_group(trace, program, program.ops, local=local, device="cpu")
    assert {trace.tensors[t].buffer for t in group.results} < kept
    values = given_values(trace)
    replayed, whole = bound(trace, values), bound(trace, values)
    for kernel in program.kernels:
        KernelRunner(trace, program, kernel.id)(replayed)
    store_results(group, whole, group.function(*group.arguments(whole)))
    for binding in program.io:
        assert torch.equal(replayed.view(binding.tensor), whole.view(binding.tensor)), binding.name


def test_a_layout_that_differs_is_copied(tracer: Callable[..., Any]) -> None:
    """A result is kept as recorded even where the op would lay it out otherwise on this device."""

    def step(net: Any, inputs: Any, state: Any) -> dict[str, torch.Tensor]:
        x = net.embed(inputs["tokens"])
        return {"y": torch.cat([x, x]).exp()}

    trace = tracer(step).trace
    program = trace.programs[0]
    op = next(op for op in program.ops if op.target.startswith("aten.exp"))
    # As if the trace had recorded it transposed.
    old = trace.tensors[op.outputs[0]]
    turned = dataclasses.replace(
        old, stride=tuple(reversed(torch.empty(tuple(reversed(old.shape))).stride()))
    )
    tensors = tuple(turned if t.id == old.id else t for t in trace.tensors)
    changed = dataclasses.replace(trace, tensors=tensors)
    group = build_group(changed, program, [op], local=(), device="cpu")
    value = torch.randn(old.shape)
    (result,) = group.function(value)
    assert result.stride() == turned.stride and torch.equal(result, value.exp())


def test_a_result_that_is_laid_out_otherwise_is_refused(tracer: Callable[..., Any]) -> None:
    """Such as a compiler's view of a padded product: what the launches write isn't what the trace says."""

    def step(net: Any, inputs: Any, state: Any) -> dict[str, torch.Tensor]:
        x = net.embed(inputs["tokens"])
        return {"y": torch.cat([x, x]).exp()}

    trace = tracer(step).trace
    program = trace.programs[0]
    group = build_group(trace, program, program.ops, local=(), device="cpu")
    memory = bound(trace, given_values(trace))
    results = list(group.function(*group.arguments(memory)))
    store_results(group, memory, results)
    last = results[-1]
    padded = torch.zeros(*last.shape[:-1], last.shape[-1] + 3)[..., : last.shape[-1]]
    with pytest.raises(ArtifactError, match=r"comes back as .* with strides .*--no-compile"):
        store_results(group, memory, [*results[:-1], padded])
