"""Streams of the user's code: numbers, the orders that events state, and how both go through every stage."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tessera_core.deps.graph import load_deps
from tessera_core.deps.races import StreamOrder
from tessera_core.deps.stage import DepsStage
from tessera_core.program.ir import Program
from tessera_core.program.store import load_trace, trace_tables
from tessera_core.program.weights import random_inputs
from tessera_core.trace.factory import build
from tessera_core.trace.request import ProgramRequest
from tessera_core.trace.stage import TraceStage
from tessera_core.trace.streams import SymbolicEvent, SymbolicStream, Timeline, symbolic_streams
from tessera_core.trace.triton_launch import launching_on_cpu
from tessera_formats.errors import ModelError, UntracedLaunchError
from tessera_formats.trace import program_digest, write_trace

Tensors = dict[str, torch.Tensor]
TWO_STREAMS = Path(__file__).parents[2] / "benchmarks" / "two_streams.py"


def waits(program: Program) -> list[tuple[int, int]]:
    return [(wait.source, wait.destination) for wait in program.stream_waits]


def streams(program: Program) -> list[int]:
    return [op.stream for op in program.ops]


def _by_wait_stream(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
    x = net.embed(inputs["tokens"])
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        y = x * 2
    z = x + 1
    main.wait_stream(side)
    return {"y": y * z}


def _by_events(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
    x = net.embed(inputs["tokens"])
    side, ready, done = (
        torch.cuda.Stream(priority=-1),
        torch.cuda.Event(),
        torch.cuda.Event(enable_timing=True),
    )
    ready.record()
    ready.wait(side)
    with torch.cuda.stream(side), torch.cuda.stream(None):
        y = x * 2
        done.record()
    z = x + 1
    done.wait()
    return {"y": y * z}


def _by_torch_streams(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
    x = net.embed(inputs["tokens"])
    side, main = torch.Stream(device="cuda"), torch.accelerator.current_stream()
    assert isinstance(side, torch.Stream)
    side.wait_event(main.record_event(torch.Event("cuda")))
    torch.accelerator.set_stream(side)
    y = x * 2
    torch.accelerator.set_stream(main)
    z = x + 1
    main.wait_event(side.record_event())
    y.record_stream(main)
    return {"y": y * z}


def _by_with(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
    x = net.embed(inputs["tokens"])
    side = torch.Stream("cuda")
    side.wait_stream(torch.cuda.default_stream())
    with side:
        y = x * 2
    z = x + 1
    torch.cuda.current_stream().wait_stream(side)
    return {"y": y * z}


def _by_library_code(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
    """With what libraries put around their streams."""
    x = net.embed(inputs["tokens"])
    least, greatest = torch.cuda.Stream.priority_range()
    with torch.cuda.device(torch.cuda.current_device()), torch.cuda.device_of(x):
        side, done = torch.cuda.Stream(device=x.device, priority=min(least, greatest)), torch.cuda.Event()
    assert isinstance(side, torch.cuda.Stream) and isinstance(done, torch.cuda.Event)
    assert not isinstance(side, torch.Event) and not isinstance(done, torch.Stream)
    assert side.device_index == 0 and side.priority == 0
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.nvtx.range("side"), torch.cuda.stream(side):
        y = x * 2
        done.record(side)
    torch.cuda.nvtx.range_push("main")
    z = x + 1
    torch.cuda.nvtx.range_pop()
    done.wait()
    return {"y": y * z}


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("step", [_by_library_code, _by_wait_stream, _by_events, _by_torch_streams, _by_with])
def test_every_way_to_state_an_order_gives_the_same_program(
    traced_program: Callable[..., Any], step: Any, fake: bool
) -> None:
    _, program = traced_program(step, fake)
    assert [op.target for op in program.ops] == [
        "aten.embedding.default", "aten.mul.Tensor", "aten.add.Tensor", "aten.mul.Tensor",
    ]  # fmt: skip
    assert streams(program) == [0, 1, 0, 0]
    assert waits(program) == [(0, 1), (1, 3)]
    # Without streams the pointwise ops are one kernel. What another stream's op feeds, and what feeds it, is apart.
    assert [op.kernel for op in program.ops] == [0, 1, 2, 3]


def test_a_synchronisation_orders_all_that_follows(traced_program: Callable[..., Any]) -> None:
    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        side, other = torch.cuda.Stream(), torch.cuda.Stream()
        x = net.embed(inputs["tokens"])
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            y = x * 2
        with torch.cuda.stream(other):
            z = x * 3
        side.synchronize()
        w = y + 1
        torch.accelerator.synchronize()
        return {"y": w + z}

    _, program = traced_program(step)
    assert streams(program) == [0, 1, 2, 0, 0]
    assert waits(program) == [(0, 1), (0, 2), (1, 3), (2, 4)]


def test_an_event_before_any_op_and_one_through_an_idle_stream(traced_program: Callable[..., Any]) -> None:
    """What an idle stream waits for goes on through events recorded there; a step's beginning needs no row."""

    def step(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        idle, side, begin = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
        torch.cuda.Event().wait(idle)  # never recorded: orders nothing
        begin.record()
        side.wait_event(begin)
        with torch.cuda.stream(side):
            first = inputs["tokens"] * 2
        x = net.embed(inputs["tokens"])
        idle.wait_stream(torch.cuda.current_stream())
        side.wait_event(idle.record_event())
        with torch.cuda.stream(side):
            y = x * 3
        torch.cuda.current_stream().wait_stream(side)
        return {"y": y, "first": first}

    _, program = traced_program(step)
    assert streams(program) == [1, 0, 1] and waits(program) == [(1, 2)]


def test_streams_belong_to_the_digest_and_not_to_a_kernels_signature(tracer: Callable[..., Any]) -> None:
    def plain(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        x = net.embed(inputs["tokens"])
        y = x @ net.embed.weight.t()
        return {"y": y @ net.embed.weight}

    def forked(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
        x = net.embed(inputs["tokens"])
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x @ net.embed.weight.t()
        torch.cuda.current_stream().wait_stream(side)
        return {"y": y @ net.embed.weight}

    one, other = tracer(plain).trace, tracer(forked).trace
    assert [k.signature for k in one.programs[0].kernels] == [k.signature for k in other.programs[0].kernels]
    digests = {program_digest(trace_tables(t), t.constants) for t in (one, other)}
    assert len(digests) == 2


def _unforked(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
    with torch.cuda.stream(torch.cuda.Stream()):
        return {"y": net.embed(inputs["tokens"])}


def _unjoined(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        return {"y": net.embed(inputs["tokens"])}


def _stream_query(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
    return {"y": inputs["tokens"] if torch.cuda.current_stream().query() else state["position"]}


def _event_query(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
    return {"y": inputs["tokens"] if torch.cuda.Event().query() else state["position"]}


def _raw_handle(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
    return {"y": inputs["tokens"] + torch.cuda.current_stream().cuda_stream}


def _external(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
    return {"y": inputs["tokens"] + bool(torch.cuda.ExternalStream(1))}


@pytest.mark.parametrize(
    ("step", "error", "says"),
    [
        (
            _unforked,
            ModelError,
            "runs on a side stream that does not wait for what came before the step; call wait_",
        ),
        (
            _unjoined,
            ModelError,
            "op 0 (aten.embedding.default) runs on side stream 1, which the step does not wait",
        ),
        (_stream_query, UntracedLaunchError, "Stream.query at {file}:"),
        (_event_query, UntracedLaunchError, "Event.query at {file}:"),
        (_raw_handle, UntracedLaunchError, "Stream.cuda_stream at {file}:"),
        (_external, UntracedLaunchError, "torch.cuda.ExternalStream at {file}:"),
    ],
)
def test_what_a_trace_cannot_order_is_one_line(
    traced_program: Callable[..., Any], step: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error) as raised:
        traced_program(step)
    assert says.format(file=__file__) in str(raised.value) and "\n" not in str(raised.value)


def test_pytorch_is_as_before_afterwards(traced_program: Callable[..., Any]) -> None:
    names = ("Stream", "Event", "current_stream", "synchronize", "stream", "set_stream", "default_stream")
    before = [getattr(torch.cuda, name) for name in names]
    before += [torch.Stream, torch.Event, vars(torch.cuda.Stream)["__new__"], torch.Tensor.record_stream]
    traced_program(_by_torch_streams)
    with pytest.raises(ModelError):
        traced_program(_unforked)
    after = [getattr(torch.cuda, name) for name in names]
    after += [torch.Stream, torch.Event, vars(torch.cuda.Stream)["__new__"], torch.Tensor.record_stream]
    assert before == after
    assert "record_stream" not in vars(torch.Tensor)


def test_a_function_imported_while_tracing_asks_anew_at_every_call() -> None:
    with symbolic_streams():
        current, made = torch.cuda.current_stream, torch.cuda.Stream()
        assert isinstance(current(), SymbolicStream)
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError), match="CUDA"):
            current()
    with pytest.raises(
        ModelError, match="where nothing is traced; make streams in the factory or in the step"
    ):
        made.synchronize()


def _racy(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
    """The side stream still reads the cache when the main one appends to it."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    x = net.embed(inputs["tokens"])
    side.wait_stream(main)
    with torch.cuda.stream(side):
        mean = state["cache"].mean(1, keepdim=True)
    state["cache"].index_copy_(1, state["position"], x)
    main.wait_stream(side)
    return {"y": mean + x}


def _ordered(net: Any, inputs: Tensors, state: Tensors) -> Tensors:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    x = net.embed(inputs["tokens"])
    side.wait_stream(main)
    with torch.cuda.stream(side):
        mean = state["cache"].mean(1, keepdim=True)
    main.wait_stream(side)
    state["cache"].index_copy_(1, state["position"], x)
    return {"y": mean + x}


def test_a_race_is_refused_with_both_ops_the_buffer_and_what_to_add(
    tracer: Callable[..., Any], tmp_path: Path
) -> None:
    for name, step in (("racy", _racy), ("ordered", _ordered)):
        trace = tracer(step).trace
        write_trace(tmp_path / f"{name}.trace", dict(trace.info), trace_tables(trace), trace.constants)
    with pytest.raises(ModelError) as raised:
        DepsStage().run(tmp_path / "racy.trace", tmp_path / "racy.deps")
    assert str(raised.value) == (
        "decode:batch=2,context=8: op 2 (aten.index_copy_.default, stream 0) writes state cache, which op 1"
        " (aten.mean.dim, stream 1) also uses, and nothing orders the two: a race; let stream 0 wait before op 2,"
        " by wait_stream or for an event recorded after op 1, and trace again"
    )
    assert not (tmp_path / "racy.deps").exists()
    DepsStage().run(tmp_path / "ordered.trace", tmp_path / "ordered.deps")


Action = tuple[str, int, int]
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("op"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("wait"), st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.just("record"), st.integers(0, 3), st.integers(0, 2)),
        st.tuples(st.just("await"), st.integers(0, 3), st.integers(0, 2)),
        st.tuples(st.just("host"), st.integers(-1, 3), st.just(0)),
    ),
    max_size=30,
)


@given(ACTIONS)
def test_the_recorded_order_is_that_of_a_direct_simulation(actions: list[Action]) -> None:
    """A simulation with a set of finished ops per stream, event and host says which op follows which."""
    timeline = Timeline()
    with symbolic_streams(lambda: timeline):
        handles = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(3))]
        events: list[SymbolicEvent] = [torch.cuda.Event() for _ in range(3)]
        behind: list[set[int]] = [set() for _ in range(4)]
        recorded: list[set[int]] = [set() for _ in range(3)]
        host: set[int] = set()
        before: list[set[int]] = []
        numbers: list[int] = []
        for side in handles[1:]:
            side.wait_stream(handles[0])
        for action, one, other in actions:
            if action == "op":
                with torch.cuda.stream(handles[one]):
                    numbers.append(timeline.issue("op"))
                before.append(behind[one] | host)
                behind[one] = before[-1] | {len(before) - 1}
            elif action == "wait":
                handles[one].wait_stream(handles[other])
                behind[one] = behind[one] | behind[other]
            elif action == "record":
                handles[one].record_event(events[other])
                recorded[other] = behind[one] | host
            elif action == "await":
                handles[one].wait_event(events[other])
                behind[one] = behind[one] | recorded[other]
            elif one < 0:
                torch.cuda.synchronize()
                host = host.union(*behind)
            else:
                handles[one].synchronize()
                host = host | behind[one]
    order = StreamOrder(_program(numbers, timeline))
    for later, follows in enumerate(before):
        for earlier in range(later):
            assert order.ordered(earlier, later) == (earlier in follows)
    # No order is stated twice, and none that the streams themselves give.
    assert len({(w.source, w.destination) for w in timeline.waits}) == len(timeline.waits)
    assert all(numbers[w.source] != numbers[w.destination] for w in timeline.waits)


def _program(numbers: list[int], timeline: Timeline) -> Program:
    from tessera_core.program.ir import Op

    ops = tuple(
        Op(
            id=number, kernel=number, target="aten.relu.default", schema="", arguments={}, inputs=(), outputs=(),
            operands=(), stream=stream,
        )
        for number, stream in enumerate(numbers)
    )  # fmt: skip
    return Program(
        id=0, name="p", phase="decode", batch=1, context=1, ops=ops, kernels=(), io=(), guards=(),
        stream_waits=tuple(timeline.waits),
    )  # fmt: skip


def test_the_two_stream_model_goes_from_trace_to_deps_with_ptx(tmp_path: Path) -> None:
    path = tmp_path / "two.trace"
    request = ProgramRequest("decode", 4, 64)
    TraceStage(model=f"{TWO_STREAMS}:factory", programs=(request,), ptx_targets=("sm_90",)).run(path)
    program = load_trace(path).programs[0]
    assert [op.target for op in program.ops if op.stream] == ["aten.mm.default", "two_streams.normed.default"]
    DepsStage().run(path, tmp_path / "two.deps")
    deps = load_deps(tmp_path / "two.deps")
    (hidden,) = (op.kernel for op in program.ops if "normed" in op.target)
    found = {a.evidence for a in deps.accesses(0) if a.kernel == hidden and a.target == "sm_90"}
    assert found == {"ptx", "schema"}  # what else the op may do on this build, only its declaration says


REPLAY = """
import sys, torch
from tessera_core.program.memory import Memory
from tessera_core.program.replay import run_program
from tessera_core.program.store import load_trace
from tessera_core.program.weights import initial_state, materialise_weights, random_inputs
trace = load_trace(sys.argv[1])
program = trace.programs[0]
memory = Memory(trace)
shared = [b.id for b in trace.buffers if b.kind in ("weight", "constant")]
for buffer, storage in (materialise_weights(trace, shared) | initial_state(trace, program)).items():
    memory.bind(buffer, storage)
for name, value in random_inputs(trace, program, 0, list(range(program.batch))).items():
    tensor = program.bindings("input")[name].tensor
    memory.bind(trace.tensors[tensor].buffer, value.untyped_storage())
run_program(trace, program, memory, trusted=sys.argv[2] == "trusted")
torch.save(memory.view(program.bindings("output")["logits"].tensor).clone(), sys.argv[3])
"""


def test_a_custom_op_that_launches_kernels_is_replayed_by_another_process(tmp_path: Path) -> None:
    """Its module is imported there, if it is trusted, and its launches run as they did while tracing."""
    path, made = tmp_path / "two.trace", tmp_path / "logits.pt"
    request = ProgramRequest("decode", 4, 64)
    TraceStage(model=f"{TWO_STREAMS}:factory", programs=(request,)).run(path)

    def replay(trust: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", REPLAY, str(path), trust, str(made)]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    refused = replay("untrusted")
    assert refused.returncode and "pass --trust-model" in refused.stderr.splitlines()[-1]
    done = replay("trusted")
    assert done.returncode == 0, done.stderr
    trace = load_trace(path)
    model = build(f"{TWO_STREAMS}:factory", None, 0, None).model
    inputs = random_inputs(trace, trace.programs[0], 0, list(range(4)))
    with symbolic_streams(), torch.no_grad(), launching_on_cpu():
        wanted = model.step(request, inputs, model.make_state(request))["logits"]
    assert torch.equal(torch.load(made), wanted)
