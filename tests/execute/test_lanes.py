"""Lanes and dispatchers of several devices in one process: whatever is placed where, and whatever order messages
arrive in, the tokens are those of the unpartitioned program.
"""

import random
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_core.execute.lane import output_digest
from tessera_core.execute.reference import Reference
from tessera_core.execute.segments import plan_routes
from tessera_core.plan.evaluate import structure_defects
from tessera_core.plan.ir import Plan
from tessera_core.program.generate import generate
from tessera_core.program.weights import random_inputs
from tests.execute.helpers import layered_trace, make_plan, place
from tests.execute.steps import KINDS, Instruction, Steps, dependencies, scattered, traced
from tests.execute.workers import Workers

DEVICES = "abc"
TRACE = layered_trace(layers=2, in_place=True)
PREFILL, DECODE = (program.name for program in TRACE.programs)
KERNELS = len(TRACE.programs[1].kernels)
TOKENS = 5


@cache
def expected(requests: int) -> list[list[int]]:
    found: list[list[int]] = generate(TRACE, *TRACE.programs, range(requests), TOKENS).tolist()
    return found


@st.composite
def placements(draw: st.DrawFn) -> Plan:
    home = draw(st.sampled_from(DEVICES))
    tables = {}
    for name in (PREFILL, DECODE):
        devices = draw(st.lists(st.sampled_from(DEVICES), min_size=KERNELS, max_size=KERNELS))
        devices[2] = devices[3] = home  # the state's writer and reader
        tables[name] = {str(kernel): device for kernel, device in enumerate(devices)}
    route = place(TRACE, tables, slots=draw(st.integers(1, 3)), boxes=draw(st.booleans()))
    return make_plan(route, types=dict.fromkeys(DEVICES, "cpu-1thread"))


@settings(deadline=None, max_examples=40)
@given(placements(), st.data())
def test_any_placement_and_any_order_of_events_give_the_same_tokens(plan: Plan, data: st.DataObject) -> None:
    (model,) = plan_routes(plan, TRACE)
    with torch.inference_mode():
        workers = Workers(TRACE, model, lambda able: data.draw(st.sampled_from(able)))
        workers.run(model.slots, [0, 0, *[1] * (TOKENS - 1)])
    for lane in range(model.slots):
        rows = [
            [workers.tokens[lane][0][0], *(workers.tokens[lane][i][0] for i in range(2, TOKENS + 1))],
            [workers.tokens[lane][1][0], *(workers.tokens[lane][i][1] for i in range(2, TOKENS + 1))],
        ]
        assert rows == expected(2 * model.slots)[2 * lane : 2 * lane + 2]


INSTRUCTIONS = st.tuples(st.sampled_from(KINDS), st.integers(0, 9), st.integers(0, 9))


def check(model: Steps, choices: random.Random, placements: int = 1) -> None:
    """Place the model at random: every output of every batch is the unpartitioned program's."""
    trace = traced(model)
    deps = dependencies(trace)
    schedule = [0, 0, 1, 1, 1] if model.feeds else [0, 0, 0]
    for _ in range(placements):
        plan = scattered(trace, deps, choices.randint(1, 3), choices.choice((2, 2, 3)), choices)
        assert structure_defects(plan, trace, deps) == []
        (route,) = plan_routes(plan, trace)
        batches, size = route.slots + 1, route.batch
        with torch.inference_mode():
            workers = Workers(trace, route, choices.choice)
            workers.run(batches, schedule)
            reference = Reference(trace, route, 0, None, False)
            for batch in range(batches):
                expected = reference.run(range(batch * size, (batch + 1) * size), schedule)
                assert workers.digests[batch] == expected.digests


@settings(deadline=None, max_examples=60)
@given(
    st.lists(INSTRUCTIONS, min_size=2, max_size=12),
    st.lists(st.integers(0, 12), min_size=1, max_size=3),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_any_program_gives_the_unpartitioned_outputs_wherever_it_is_placed(
    instructions: list[Instruction], outputs: list[int], loop: bool, seed: int
) -> None:
    check(Steps(instructions, outputs, loop), random.Random(seed), placements=2)


@pytest.mark.parametrize(
    ("instructions", "outputs"),
    [
        # Allocated by one device, fully rewritten in place by others, read in between.
        (
            [
                ("zeros", 0, 0),
                ("linear", 0, 0),
                ("copy", 2, 3),
                ("linear", 0, 2),
                ("copy", 2, 4),
                ("linear", 0, 2),
            ],
            [5],
        ),
        # A full write into what was received before, and the next batch's content behind it.
        ([("linear", 0, 0), ("linear", 0, 2), ("copy", 2, 3), ("linear", 0, 2), ("fill", 2, 0)], [4, 2]),
        # One device reads the input that another changes; nothing feeds it, so each iteration begins alike.
        ([("linear", 0, 1), ("scale", 1, 0), ("linear", 0, 1), ("half", 1, 3), ("linear", 0, 1)], [2, 4, 1]),
        # Outputs filled by several kernels, the late half first, and one that no kernel reads.
        ([("linear", 0, 0), ("halves", 0, 2), ("linear", 0, 3), ("halves", 4, 1), ("half", 3, 4)], [3, 5]),
        # Outputs that nothing writes: an input, and weights, of which one is read.
        ([("linear", 0, 0), ("linear", 0, 2)], [1, 4, 5]),
    ],
    ids=["rewritten", "after-receive", "input-changed", "filled-in-parts", "unwritten"],
)
@pytest.mark.parametrize("loop", [False, True], ids=["once", "loop"])
def test_a_buffer_with_content_of_its_own_on_a_device_is_never_the_receive_region(
    instructions: list[Instruction], outputs: list[int], loop: bool
) -> None:
    check(Steps(instructions, outputs, loop), random.Random(5), placements=6)


def test_an_input_that_nothing_feeds_holds_the_prompt_of_each_request() -> None:
    trace = traced(Steps([("linear", 0, 1), ("scale", 1, 0)], [1], loop=True))
    (route,) = plan_routes(scattered(trace, dependencies(trace), 1, 2, random.Random(0)), trace)
    with torch.inference_mode():
        workers = Workers(trace, route, lambda able: able[0])
        workers.run(2, [0, 0, 1, 1, 1])
    decode = trace.programs[1]
    for batch in range(2):
        prompt = random_inputs(trace, decode, 0, [2 * batch, 2 * batch + 1])["z"]
        assert workers.digests[batch]["y0"] == output_digest(prompt * 0.5)


def test_activations_are_released_after_their_last_use_on_a_device() -> None:
    table = {"0-6": "a", "7": "b", f"8-{KERNELS - 1}": "a"}
    (route,) = plan_routes(
        make_plan(place(TRACE, {PREFILL: table, DECODE: table}), types=dict.fromkeys(DEVICES, "cpu-1thread")),
        TRACE,
    )
    with torch.inference_mode():
        workers = Workers(TRACE, route, lambda able: able[0])
        workers.run(3, [0, 0, 1, 1])
    held = {
        device: [
            buffer.id
            for buffer in TRACE.buffers
            if buffer.kind == "activation" and lanes[0]._memory.is_bound(buffer.id)
        ]
        for device, lanes in workers.lanes.items()
    }
    received = {move.transfer.destination: [] for move in route.transfers}  # type: ignore[var-annotated]
    for move in route.transfers:
        if move.used:
            received[move.transfer.destination].append(move.transfer.buffer)
    assert held == {device: sorted(buffers) for device, buffers in received.items()}
