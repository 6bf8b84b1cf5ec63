"""Segments of any placement: every kernel once, in order, after what it needs, and never a deadlock."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_core.execute.feeds import last_writer, writers
from tessera_core.execute.segments import Costs, plan_costs, plan_routes
from tessera_core.execute.simulator import BatchPlan, Span, simulate
from tessera_core.plan.cluster import Link
from tessera_core.plan.ir import Assignment, Plan, Route
from tessera_core.program.ir import Trace
from tessera_formats.errors import ArtifactError
from tests.execute.helpers import layered_trace, make_plan, place
from tests.execute.steps import Steps, traced

TRACE = layered_trace(prefill_batch=1, batch=2)
PREFILL, DECODE = (program.name for program in TRACE.programs)
KERNELS = len(TRACE.programs[1].kernels)
DEVICES = "abc"
TYPES = dict.fromkeys(DEVICES, "cpu-1thread")


@st.composite
def placements(draw: st.DrawFn) -> Plan:
    home = draw(st.sampled_from(DEVICES))
    tables = {}
    for name in (PREFILL, DECODE):
        devices = draw(st.lists(st.sampled_from(DEVICES), min_size=KERNELS, max_size=KERNELS))
        devices[2] = devices[3] = home  # the state's writer and reader
        tables[name] = {str(kernel): device for kernel, device in enumerate(devices)}
    return make_plan(place(TRACE, tables, slots=draw(st.integers(1, 4))), types=TYPES)


@st.composite
def links(draw: st.DrawFn) -> Costs:
    def one() -> Link:
        return Link(
            latency_us=draw(st.sampled_from([0.0, 1.0, 40.0])),
            gbit_per_s=draw(st.sampled_from([0.01, 1.0])),
            send_us=draw(st.sampled_from([0.0, 2.0])),
            receive_us=draw(st.sampled_from([0.0, 3.0])),
            occupies_sender=draw(st.booleans()),
        )

    return Costs({(s, d): one() for s in DEVICES for d in DEVICES if s != d}, {"a": 1.0})


@settings(deadline=None, max_examples=60)
@given(placements(), links(), st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_any_placement_runs_to_its_end_and_in_order(plan: Plan, costs: Costs, decodes: list[int]) -> None:
    models = plan_routes(plan, TRACE, costs)
    batches = [
        BatchPlan(batch=number, route=0, arrival_us=5.0 * number, iterations=(2, count))
        for number, count in enumerate(decodes)
    ]
    spans = [span for span in simulate(models, batches) if span.kind == "compute"]
    at: dict[tuple[int, int, int], Span] = {}
    for span in spans:
        program = next(item for item in models[0].programs if item.name == span.program)
        for kernel in program.segments[span.device][span.segment].kernels:
            key = (span.batch, span.iteration, kernel)
            assert key not in at
            at[key] = span
    assert len(at) == sum((2 + count) * KERNELS for count in decodes)
    placed = plan.placement
    for batch in batches:
        for iteration, index in enumerate(batch.schedule):
            program = TRACE.programs[index]
            made: dict[int, int] = {}
            for op in program.ops:
                here = at[batch.batch, iteration, op.kernel]
                assert here.device == placed[0, program.name][op.kernel][0]
                for tensor in op.inputs:
                    buffer = TRACE.tensors[tensor].buffer
                    if buffer in made:
                        source = at[batch.batch, iteration, made[buffer]]
                        assert source is here or source.end_us <= here.start_us
                for tensor in op.outputs:
                    made[TRACE.tensors[tensor].buffer] = op.kernel
            if index == 1:
                for earlier in range(2) if iteration == 2 else (iteration - 1,):
                    assert (
                        at[batch.batch, earlier, KERNELS - 1].end_us <= at[batch.batch, iteration, 0].start_us
                    )
    for device in DEVICES:
        busy = sorted((span.start_us, span.end_us) for span in spans if span.device == device)
        assert all(first[1] <= second[0] for first, second in pairwise(busy))


@settings(deadline=None, max_examples=40)
@given(placements())
def test_segments_are_maximal(plan: Plan) -> None:
    (model,) = plan_routes(plan, TRACE)
    for program in model.programs:
        for device, segments in program.segments.items():
            fed_from_outside = any(
                move.feeds is not None and move.transfer.destination == device for move in model.transfers
            )
            for before, after in pairwise(segments):
                assert before.kernels[-1] < after.kernels[0]
                assert before.sends or after.receives or (after.fed and fed_from_outside)


def plan() -> Plan:
    chain = {"0-4": "a", "5-11": "b"}
    return make_plan(place(TRACE, {PREFILL: chain, DECODE: chain}), types=TYPES)


def test_costs_come_from_what_the_plan_states() -> None:
    stated = replace(
        plan(),
        facts={
            **plan().facts,
            "link": [
                {
                    "source": "a",
                    "destination": "b",
                    "latency_us": 4.0,
                    "gbit_per_s": 0.512,
                    "send_us": 1.0,
                    "receive_us": 2.0,
                    "occupies_sender": True,
                }
            ],
            "overhead": [{"device": "b", "overhead_us": 9.0}],
        },
    )
    assert plan_costs(stated).overhead_us == {"b": 9.0}
    (model,) = plan_routes(stated, TRACE)
    move = next(m for m in model.transfers if m.program == 1 and m.transfer.source == "a")
    assert (move.sender_us, move.link_us, move.latency_us, move.receiver_us) == (1.0 + 2.0, 0.0, 4.0, 2.0)
    assert model.programs[1].segments["b"][0].duration_us == pytest.approx(9 + 2 + 70)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: replace(p, assignments=p.assignments[:-1]), "kernel 11 .* has no device"),
        (lambda p: replace(p, transfers=p.transfers[:-1]), "a needs tokens of decode.*nor shipped"),
        (
            lambda p: replace(p, transfers=(replace(p.transfers[0], combine="add"), *p.transfers[1:])),
            "lands by add",
        ),
        (
            lambda p: replace(p, transfers=(replace(p.transfers[0], producer=7), *p.transfers[1:])),
            "a sends buffer .* does not run kernel 7",
        ),
        (
            lambda p: replace(p, transfers=(*p.transfers, replace(p.transfers[0], destination="c"))),
            "c receives buffer .* nothing there uses it",
        ),
        (
            lambda p: replace(p, routes=(replace(p.routes[0], programs=("prefill", "decode")),)),
            "uses prefill, which the trace lacks",
        ),
        (
            lambda p: replace(
                p,
                assignments=tuple(
                    replace(a, device="b") if a.program == DECODE and a.kernel in (2, 3) else a
                    for a in p.assignments
                ),
            ),
            "b uses state sum in decode.* but not in prefill",
        ),
    ],
)
def test_a_plan_that_does_not_fit_its_trace_is_refused(change, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ArtifactError, match=message):
        plan_routes(change(plan()), TRACE)


def on_one_device(trace: Trace) -> Plan:
    assignments = [
        Assignment(route=0, program=program.name, kernel=kernel.id, part="whole", device="a", time_us=1.0)
        for program in trace.programs
        for kernel in program.kernels
    ]
    names = tuple(program.name for program in trace.programs)
    route = Route(
        route=0, share=1.0, batch=trace.programs[-1].batch, slots=1, programs=names, rates=(1,) * len(names)
    )
    return make_plan((route, assignments, [], []), types=TYPES)


def test_the_last_writer_is_the_one_with_the_largest_kernel_id() -> None:
    trace = traced(Steps([("linear", 0, 0), ("halves", 0, 2)], [3], loop=False))
    (program,) = trace.programs
    buffer = trace.tensors[program.bindings("output")["y0"].tensor].buffer
    writing = {
        op.kernel
        for op in program.ops
        if op.target.startswith("aten.copy_") and trace.tensors[op.outputs[0]].buffer == buffer
    }
    assert len(writing) == 2
    assert last_writer(trace, program, buffer) == max(writing)
    backwards = replace(program, ops=tuple(reversed(program.ops)))
    assert last_writer(trace, backwards, buffer) == max(writing)


def test_writers_of_an_output_on_different_devices_are_refused() -> None:
    trace = traced(Steps([("linear", 0, 0), ("halves", 0, 2)], [3], loop=False))
    (program,) = trace.programs
    buffer = trace.tensors[program.bindings("output")["y0"].tensor].buffer
    first, last = min(writers(trace, program, buffer)), max(writers(trace, program, buffer))
    plan = on_one_device(trace)
    assert plan_routes(plan, trace)
    apart = replace(
        plan,
        assignments=tuple(replace(a, device="b") if a.kernel == first else a for a in plan.assignments),
    )
    with pytest.raises(
        ArtifactError, match=f"output y0 is written by kernels {first} and {last} on different"
    ):
        plan_routes(apart, trace)


class GivesInput(Steps):
    """The fed input itself as an output, which no kernel touches or writes; or one that feeds another."""

    def __init__(self, feeds: dict[str, str], given: str) -> None:
        super().__init__([("linear", 0, 1)], [2], loop=True)
        self.feeds, self.given = feeds, given

    def step(self, request, inputs, state):  # type: ignore[no-untyped-def]
        return {**super().step(request, inputs, state), "given": inputs[self.given]}


class ChangesWhatPrefillFeeds(Steps):
    """Only prefill feeds z; decode changes it in place."""

    def __init__(self) -> None:
        super().__init__([("linear", 0, 1), ("scale", 1, 0)], [2], loop=True)
        self.feeds = {"next": "x", "context": "z"}

    def step(self, request, inputs, state):  # type: ignore[no-untyped-def]
        made = super().step(request, inputs, state)
        return {**made, "context": made["y0"] + 1} if request.phase == "prefill" else made


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (GivesInput({"next": "x"}, "x"), "output given is touched by no kernel; return a clone"),
        (GivesInput({"next": "x", "given": "z"}, "z"), "output given feeds z, but no kernel writes it"),
        (ChangesWhatPrefillFeeds(), "input z is written in place and only prefill.* feeds it"),
    ],
)
def test_what_cannot_be_run_partitioned_is_refused(model: Steps, message: str) -> None:
    trace = traced(model)
    with pytest.raises(ArtifactError, match=message):
        plan_routes(on_one_device(trace), trace)
