"""Replay against eager PyTorch on programs written by hand, and what it refuses."""

import multiprocessing.shared_memory
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tessera_core.program.memory import Memory, allocate
from tessera_core.program.replay import KernelRunner, ProgramRunner, run_program
from tessera_core.program.weights import initial_state, materialise_weights
from tessera_formats.errors import ArtifactError, TesseraError, TrustError


def ref(number: int) -> dict[str, int]:
    return {"tensor": number}


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.contiguous().clone().untyped_storage()


def test_ops_and_views_give_what_eager_gives(writer: Any) -> None:
    x = writer.input("x", (4, 6))
    product = writer.buffer("activation", (4, 4))
    turned = writer.view(writer.tensors[product].buffer, (4, 4), (1, 4))
    total = writer.buffer("output", (4, 4))
    transposed = writer.view(writer.tensors[x].buffer, (6, 4), (1, 6))
    writer.op("aten.mm.default", [ref(x), ref(transposed)], [product])
    writer.op("aten.add.Tensor", [ref(product), ref(turned)], [total], {"alpha": 2})
    writer.bind("output", "y", total)
    trace = writer.trace()
    value = torch.randn(4, 6)
    memory = Memory(trace)
    memory.bind(writer.tensors[x].buffer, storage_of(value))
    run_program(trace, trace.programs[0], memory)
    expected = value @ value.T
    assert torch.equal(memory.view(total), expected + 2 * expected.T)


def test_a_second_iteration_sees_new_values_through_every_view(writer: Any) -> None:
    """Views are cached, so a rebound buffer must not leave a stale one behind."""
    x = writer.input("x", (2, 3))
    doubled = writer.buffer("activation", (2, 3))
    turned = writer.view(writer.tensors[doubled].buffer, (3, 2), (1, 3))
    result = writer.buffer("output", (3, 2))
    writer.op("aten.mul.Scalar", [ref(x), 2], [doubled])
    writer.op(
        "aten.clone.default",
        [ref(turned)],
        [result],
        {"memory_format": {"memory_format": "contiguous_format"}},
    )
    writer.bind("output", "y", result)
    trace = writer.trace()
    memory, runner = Memory(trace), ProgramRunner(trace, trace.programs[0])
    for _ in range(3):
        value = torch.randn(2, 3)
        memory.bind(writer.tensors[x].buffer, storage_of(value))
        runner(memory)
        assert torch.equal(memory.view(result), (value * 2).T)


def test_results_are_stored_in_the_recorded_strides(writer: Any) -> None:
    x = writer.input("x", (3, 5))
    result = writer.buffer("output", (15,))
    buffer = writer.tensors[result].buffer
    columns_first = writer.view(buffer, (3, 5), (1, 3))
    writer.op("aten.neg.default", [ref(x)], [columns_first])
    writer.bind("output", "y", columns_first)
    trace = writer.trace()
    value = torch.randn(3, 5)
    memory = Memory(trace)
    memory.bind(writer.tensors[x].buffer, storage_of(value))
    run_program(trace, trace.programs[0], memory)
    raw = torch.empty(0).set_(memory.storage(buffer), 0, (15,), (1,))
    assert torch.equal(raw, -value.T.reshape(15))


def test_several_results_and_lists_of_tensors(writer: Any) -> None:
    x = writer.input("x", (4, 8))
    both = writer.buffer("activation", (4, 16))
    values, indices = writer.buffer("output", (4, 2)), writer.buffer("output", (4, 2), "int64")
    writer.op("aten.cat.default", [[ref(x), ref(x)], 1], [both])
    writer.op("aten.topk.default", [ref(both), 2], [values, indices])
    writer.bind("output", "v", values)
    trace = writer.trace()
    value = torch.randn(4, 8)
    memory = Memory(trace)
    memory.bind(writer.tensors[x].buffer, storage_of(value))
    run_program(trace, trace.programs[0], memory)
    expected = torch.cat([value, value], 1).topk(2)
    assert torch.equal(memory.view(values), expected.values)
    assert torch.equal(memory.view(indices), expected.indices)


def test_results_that_share_a_storage_stay_together(writer: Any) -> None:
    x = writer.input("x", (2, 6))
    left = writer.buffer("activation", (2, 6))
    buffer = writer.tensors[left].buffer
    first, second = writer.view(buffer, (2, 3), (3, 1)), writer.view(buffer, (2, 3), (3, 1), 6)
    writer.op("aten.split_copy.Tensor", [ref(x), 3, 1], [first, second])
    flat = writer.view(buffer, (12,))
    result = writer.buffer("output", (12,))
    writer.op("aten.neg.default", [ref(flat)], [result])
    writer.bind("output", "y", result)
    trace = writer.trace()
    value = torch.randn(2, 6)
    memory = Memory(trace)
    memory.bind(writer.tensors[x].buffer, storage_of(value))
    run_program(trace, trace.programs[0], memory)
    assert torch.equal(memory.view(result), -torch.cat([value[:, :3].reshape(-1), value[:, 3:].reshape(-1)]))


def test_state_is_written_in_place_and_starts_fresh(writer: Any) -> None:
    cache = writer.state("cache", (4, 2))
    position = writer.state("position", (1,), "int64")
    row = writer.input("row", (1, 2))
    writer.op("aten.index_copy_.default", [ref(cache), 0, ref(position), ref(row)], [cache])
    writer.op("aten.add_.Tensor", [ref(position), 1], [position])
    trace = writer.trace()
    memory, runner = Memory(trace), ProgramRunner(trace, trace.programs[0])
    memory.bind_all(initial_state(trace, trace.programs[0]))
    before = memory.storage(writer.tensors[cache].buffer).data_ptr()
    for number in range(3):
        memory.bind(writer.tensors[row].buffer, storage_of(torch.full((1, 2), float(number + 1))))
        runner(memory)
    assert memory.storage(writer.tensors[cache].buffer).data_ptr() == before
    assert memory.view(cache).tolist() == [[1, 1], [2, 2], [3, 3], [0, 0]]
    assert memory.view(position).tolist() == [3]


def test_fixed_buffers_keep_their_shared_memory(writer: Any) -> None:
    x = writer.input("x", (8,))
    result = writer.buffer("output", (8,))
    buffer = writer.tensors[result].buffer
    writer.op("aten.exp.default", [ref(x)], [result])
    writer.bind("output", "y", result)
    trace = writer.trace()
    shared = multiprocessing.shared_memory.SharedMemory(create=True, size=64)
    try:
        region = torch.frombuffer(shared.buf, dtype=torch.uint8, offset=16, count=32).untyped_storage()
        memory = Memory(trace, fixed=(buffer,))
        memory.bind(buffer, region)
        value = torch.randn(8)
        memory.bind(writer.tensors[x].buffer, storage_of(value))
        run_program(trace, trace.programs[0], memory)
        assert torch.equal(torch.frombuffer(shared.buf, dtype=torch.float32, offset=16, count=8), value.exp())
        del memory, region
    finally:
        shared.close()
        shared.unlink()


def test_two_slots_share_weights_and_nothing_else(writer: Any) -> None:
    weight = writer.weight("w", (3, 3), {"kind": "normal", "std": 1.0})
    x = writer.input("x", (2, 3))
    result = writer.buffer("output", (2, 3))
    writer.op("aten.mm.default", [ref(x), ref(weight)], [result])
    writer.bind("output", "y", result)
    trace = writer.trace()
    weights = materialise_weights(trace, [writer.tensors[weight].buffer])
    slots = []
    for _ in range(2):
        memory = Memory(trace)
        memory.bind_all(weights)
        value = torch.randn(2, 3)
        memory.bind(writer.tensors[x].buffer, storage_of(value))
        slots.append((memory, value))
    for memory, _ in slots:
        run_program(trace, trace.programs[0], memory)
    for memory, value in slots:
        assert torch.equal(memory.view(result), value @ slots[0][0].view(weight))


def test_buffers_of_one_kernel_do_not_outlive_it(writer: Any) -> None:
    x = writer.input("x", (4,))
    inner = writer.buffer("activation", (4,))
    result = writer.buffer("output", (4,))
    writer.op("aten.neg.default", [ref(x)], [inner])
    writer.op("aten.exp.default", [ref(inner)], [result], same_kernel=True)
    writer.bind("output", "y", result)
    trace = writer.trace()
    memory = Memory(trace)
    memory.bind(writer.tensors[x].buffer, storage_of(torch.randn(4)))
    KernelRunner(trace, trace.programs[0], 0)(memory)
    assert memory.is_bound(writer.tensors[result].buffer)
    assert not memory.is_bound(writer.tensors[inner].buffer)


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("aten.from_file.default", ArtifactError),
        ("aten.save.default", ArtifactError),
        ("aten.set_.source_Storage", ArtifactError),
        ("aten.nothing_of_the_kind.default", ArtifactError),
        ("aten.neg", ArtifactError),
        ("os.system.default", TrustError),
        ("profiler._record_function_enter.default", TrustError),
        ("aten.__class__.default", ArtifactError),
        ("triton.os:system", TrustError),
        ("triton.tessera_core.trace.request:parse_program", ArtifactError),
        ("triton.tessera_core.trace.no_such_module:kernel", ArtifactError),
    ],
)
def test_only_allowed_operators_are_resolved(
    writer: Any, one_line: Any, target: str, error: type[Exception]
) -> None:
    x = writer.input("x", (4,))
    writer.op(target, [ref(x)], [writer.buffer("output", (4,))])
    trace = writer.trace()
    with pytest.raises(error) as caught:
        KernelRunner(trace, trace.programs[0], 0)
    assert target in one_line(caught)


@pytest.mark.parametrize(
    "argument",
    [
        {"tensor": 99},
        {"tensor": -1},
        {"tensor": "0"},
        {"tensor": True},
        {"dtype": "float33"},
        {"dtype": "save"},
        {"layout": "float32"},
        {"device": "cuda:7"},
        {"code": "1 + 1"},
        {},
    ],
)
def test_corrupted_arguments_are_refused_when_built(writer: Any, one_line: Any, argument: Any) -> None:
    x = writer.input("x", (4,))
    writer.op("aten.add.Tensor", [ref(x), argument], [writer.buffer("output", (4,))])
    trace = writer.trace()
    with pytest.raises(ArtifactError) as caught:
        KernelRunner(trace, trace.programs[0], 0)
    assert "aten.add.Tensor" in one_line(caught)


def test_arguments_that_the_operator_rejects_are_an_artifact_error(writer: Any, one_line: Any) -> None:
    x = writer.input("x", (4,))
    writer.op("aten.mm.default", [ref(x), "four"], [writer.buffer("output", (4,))])
    trace = writer.trace()
    memory = Memory(trace)
    memory.bind(writer.tensors[x].buffer, allocate(trace, writer.tensors[x].buffer))
    with pytest.raises(ArtifactError) as caught:
        run_program(trace, trace.programs[0], memory)
    assert "op 0 (aten.mm.default)" in one_line(caught)


def test_a_result_of_another_shape_is_an_artifact_error(writer: Any, one_line: Any) -> None:
    x = writer.input("x", (4,))
    writer.op("aten.sum.dim_IntList", [ref(x), [0], True], [writer.buffer("output", (4,))])
    trace = writer.trace()
    memory = Memory(trace)
    memory.bind(writer.tensors[x].buffer, allocate(trace, writer.tensors[x].buffer))
    with pytest.raises(ArtifactError) as caught:
        run_program(trace, trace.programs[0], memory)
    assert "(1,)" in one_line(caught)


def test_use_before_definition_and_short_storages_are_named(writer: Any, one_line: Any) -> None:
    x = writer.input("x", (4,))
    writer.op("aten.neg.default", [ref(x)], [writer.buffer("output", (4,))])
    trace = writer.trace()
    memory = Memory(trace)
    with pytest.raises(ArtifactError) as caught:
        run_program(trace, trace.programs[0], memory)
    assert "x" in one_line(caught)
    with pytest.raises(ArtifactError) as caught:
        memory.bind(writer.tensors[x].buffer, torch.zeros(15, dtype=torch.uint8).untyped_storage())
    assert "16 bytes" in one_line(caught)


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        ("aten._reshape_alias.default", [[1 << 20], [1]]),
        ("aten.as_strided.default", [[4], [1]]),
        ("aten.as_strided_.default", [[4], [1]]),
        ("aten.resize_as_.default", [{"tensor": 0}]),
        ("aten.set.source_Tensor", [{"tensor": 0}]),
    ],
)
def test_operators_that_look_beyond_a_storage_are_refused_when_built(
    writer: Any, one_line: Any, target: str, arguments: list[Any]
) -> None:
    """No trace has them as ops, and not all of them look where a storage ends."""
    x = writer.input("x", (4,))
    writer.op(target, [ref(x), *arguments], [writer.buffer("output", (1 << 20,))])
    trace = writer.trace()
    with pytest.raises(ArtifactError) as caught:
        KernelRunner(trace, trace.programs[0], 0)
    assert target in one_line(caught)


def test_views_past_the_end_of_a_storage_are_refused(writer: Any, one_line: Any) -> None:
    x = writer.input("x", (4,))
    beyond = writer.view(writer.tensors[x].buffer, (4,), (1,), 2)
    writer.op("aten.neg.default", [ref(beyond)], [writer.buffer("output", (4,))])
    trace = writer.trace()
    memory = Memory(trace)
    memory.bind(writer.tensors[x].buffer, allocate(trace, writer.tensors[x].buffer))
    with pytest.raises(ArtifactError) as caught:
        run_program(trace, trace.programs[0], memory)
    assert f"tensor {beyond}" in one_line(caught)


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-9, 99),
    st.floats(-9, 9),
    st.text(max_size=4),
    st.builds(ref, st.integers(-2, 9)),
    st.sampled_from([{"dtype": "int64"}, {"dtype": "x"}, {"layout": "strided"}, {"device": "any"}, {}]),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_damage_to_arguments_is_our_error_or_harmless(writer_class: Any, data: st.DataObject) -> None:
    """Whatever stands in the arguments: replay ends, or one of our own errors says why it cannot."""
    writer = writer_class()
    x, y = writer.input("x", (4, 4)), writer.input("y", (4, 4))
    outs = [writer.buffer("output", (4, 4)) for _ in range(3)]
    writer.op("aten.mm.default", [ref(x), ref(y)], [outs[0]])
    writer.op("aten.add.Tensor", [ref(outs[0]), ref(y)], [outs[1]], {"alpha": 2})
    writer.op("aten.cat.default", [[ref(outs[0])], 1], [outs[2]])
    trace = writer.trace()
    victim = data.draw(st.integers(0, 2))
    op = trace.programs[0].ops[victim]
    args = list(op.arguments["args"])
    args[data.draw(st.integers(0, len(args) - 1))] = data.draw(
        st.one_of(LEAVES, st.lists(LEAVES, max_size=3))
    )
    damaged = replace(op, arguments={**op.arguments, "args": args})
    ops = tuple(damaged if number == victim else op for number, op in enumerate(trace.programs[0].ops))
    trace = replace(trace, programs=(replace(trace.programs[0], ops=ops),))
    memory = Memory(trace)
    for tensor in (x, y):
        memory.bind(writer.tensors[tensor].buffer, storage_of(torch.ones(4, 4)))
    try:
        run_program(trace, trace.programs[0], memory)
    except TesseraError as problem:
        assert "\n" not in str(problem)


@pytest.mark.serial
def test_replay_adds_little_to_each_op(writer: Any) -> None:
    """At most 8 us an op, kernels of one op; the best of many, because the machine does other things too."""
    torch.set_num_threads(1)
    x = last = writer.input("x", (4,))
    count = 500
    for number in range(count):
        following = writer.buffer("output" if number == count - 1 else "activation", (4,))
        writer.op("aten.add.Tensor", [ref(last), ref(x)], [following])
        last = following
    trace = writer.trace()
    memory, runner = Memory(trace), ProgramRunner(trace, trace.programs[0])
    memory.bind(writer.tensors[x].buffer, storage_of(torch.ones(4)))
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        runner(memory)
        seconds.append(time.perf_counter() - start)
    assert memory.view(last).tolist() == [count + 1] * 4
    assert min(seconds) / count * 1e6 < 8
