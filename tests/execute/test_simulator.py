"""The simulator against schedules worked out by hand.

The toy decode program has 12 kernels of 10 us: "a" runs the first 5 (50 us), "b" the other 7 (70 us); kernel 4's
result (128 bytes) crosses, and the token (16 bytes) comes back for the next iteration.
"""

import pytest

from tessera_core.execute.segments import Costs, RouteModel, plan_routes
from tessera_core.execute.simulator import (
    BatchPlan,
    Span,
    completions,
    simulate,
    steady,
    steady_interval,
)
from tessera_core.plan.cluster import Link
from tests.execute.helpers import layered_trace, make_plan, place

TRACE = layered_trace()
PREFILL, DECODE = (program.name for program in TRACE.programs)
CHAIN = {"0-4": "a", "5-11": "b"}
TYPES = {"a": "cpu-1thread", "b": "cpu-1thread"}


def chain(
    slots: int, link: Link | None = None, overhead_us: float = 0.0, transfer_us: float = 0.0
) -> RouteModel:
    route = place(TRACE, {PREFILL: CHAIN, DECODE: CHAIN}, slots=slots, transfer_us=transfer_us)
    links = {} if link is None else {("a", "b"): link, ("b", "a"): link}
    costs = Costs(links, {"a": overhead_us, "b": overhead_us})
    return plan_routes(make_plan(route, types=TYPES), TRACE, costs)[0]


def link(
    latency_us: float = 0.0,
    gbit_per_s: float = 1e9,
    send_us: float = 0.0,
    receive_us: float = 0.0,
    occupies_sender: bool = False,
) -> Link:
    return Link(
        latency_us=latency_us,
        gbit_per_s=gbit_per_s,
        send_us=send_us,
        receive_us=receive_us,
        occupies_sender=occupies_sender,
    )


def of(spans: list[Span], device: str, kind: str = "compute") -> list[tuple[int, int, float, float]]:
    return [
        (s.batch, s.iteration, s.start_us, s.end_us) for s in spans if s.device == device and s.kind == kind
    ]


@pytest.mark.parametrize("slots", [1, 3])
def test_one_device_takes_its_kernels_time(slots: int) -> None:
    model = plan_routes(
        make_plan(place(TRACE, "a", slots=slots), types={"a": "cpu-1thread"}), TRACE, Costs({}, {"a": 2.5})
    )[0]
    assert steady_interval(model, DECODE) == pytest.approx(120 + 2.5)
    assert steady_interval(model, PREFILL) == pytest.approx(120 + 2.5)


@pytest.mark.parametrize(("slots", "interval"), [(1, 126.0), (2, 70.0), (4, 70.0)])
def test_a_chain_is_bound_by_its_latency_and_then_by_its_slower_device(slots: int, interval: float) -> None:
    assert steady_interval(chain(slots, transfer_us=3.0), DECODE) == pytest.approx(interval)


@pytest.mark.parametrize(("slots", "interval"), [(1, 320.0), (2, 160.0), (4, 80.0), (5, 70.0)])
def test_latency_takes_no_resource_but_the_recurrence_waits_for_it(slots: int, interval: float) -> None:
    assert steady_interval(chain(slots, link(latency_us=100)), DECODE) == pytest.approx(interval, abs=0.01)


def test_a_link_is_a_resource() -> None:
    # 128 bytes at 8.533 Mbit/s: 120 us on the wire, longer than either device computes.
    slow = link(gbit_per_s=128 * 8e-3 / 120)
    assert steady_interval(chain(8, slow), DECODE) == pytest.approx(120)
    # One slot: 50 + 120 + 70 and 16 bytes back, 15 us.
    assert steady_interval(chain(1, slow), DECODE) == pytest.approx(255)


def test_a_copying_sender_computes_nothing_meanwhile() -> None:
    # 128 bytes take 30 us of a's time, 16 bytes back 3.75 us of b's: a is busy for 80 us.
    copying = link(gbit_per_s=128 * 8e-3 / 30, occupies_sender=True)
    assert steady_interval(chain(4, copying), DECODE) == pytest.approx(80)
    assert steady_interval(chain(1, copying), DECODE) == pytest.approx(50 + 30 + 70 + 3.75)


def test_sending_and_receiving_cost_their_device() -> None:
    model = chain(4, link(send_us=5, receive_us=7), overhead_us=1)
    # b: overhead, receive, compute, send of the token.
    assert steady_interval(model, DECODE) == pytest.approx(1 + 7 + 70 + 5, abs=0.01)
    alone = chain(1, link(send_us=5, receive_us=7), overhead_us=1)
    assert steady_interval(alone, DECODE) == pytest.approx((1 + 7 + 50 + 5) + (1 + 7 + 70 + 5), abs=0.01)


def test_spans_of_two_slots_as_drawn_by_hand() -> None:
    spans = simulate(
        [chain(2, transfer_us=3.0)],
        [BatchPlan(batch=b, route=0, arrival_us=0.0, iterations=(0, 2)) for b in range(2)],
    )
    assert of(spans, "a") == [(0, 0, 0, 50), (1, 0, 50, 100), (0, 1, 126, 176), (1, 1, 196, 246)]
    assert of(spans, "b") == [(0, 0, 53, 123), (1, 0, 123, 193), (0, 1, 193, 263), (1, 1, 263, 333)]
    # The last iteration's token feeds nothing and stays.
    assert of(spans, "b", "send") == [(0, 0, 123, 126), (1, 0, 193, 196)]


def test_a_slot_is_refilled_when_every_device_has_ended_its_batch() -> None:
    spans = simulate(
        [chain(1)], [BatchPlan(batch=b, route=0, arrival_us=40.0 * b, iterations=(0, 1)) for b in range(2)]
    )
    assert of(spans, "a") == [(0, 0, 0, 50), (1, 0, 120, 170)]


def test_prefill_iterations_of_a_slot_wait_for_its_regions_and_decode_for_all_of_their_tokens() -> None:
    spans = simulate([chain(1)], [BatchPlan(batch=0, route=0, arrival_us=0.0, iterations=(2, 1))])
    # a could go on at 50, but b still works in the region that a would send to.
    assert of(spans, "a") == [(0, 0, 0, 50), (0, 1, 120, 170), (0, 2, 240, 290)]
    assert of(spans, "b") == [(0, 0, 50, 120), (0, 1, 170, 240), (0, 2, 290, 360)]


def test_another_slot_uses_the_time_for_which_a_region_is_held() -> None:
    spans = simulate(
        [chain(2)], [BatchPlan(batch=b, route=0, arrival_us=0.0, iterations=(2, 0)) for b in range(2)]
    )
    assert of(spans, "b") == [(0, 0, 50, 120), (1, 0, 120, 190), (0, 1, 190, 260), (1, 1, 260, 330)]


def test_the_iteration_that_a_device_entered_first_goes_first() -> None:
    # Three slots on one device: each batch gets its turn although the first is always ready.
    model = plan_routes(make_plan(place(TRACE, "a", slots=3), types={"a": "cpu-1thread"}), TRACE)[0]
    spans = simulate(
        [model], [BatchPlan(batch=b, route=0, arrival_us=0.0, iterations=(0, 2)) for b in range(3)]
    )
    assert [(batch, iteration) for batch, iteration, *_ in of(spans, "a")] == [
        (0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)
    ]  # fmt: skip


def test_routes_share_a_device_and_run_side_by_side_on_their_own() -> None:
    models = plan_routes(
        make_plan(
            place(TRACE, "a", route=0, slots=1, share=0.5),
            place(TRACE, "b", route=1, slots=1, share=0.5),
            types=TYPES,
        ),
        TRACE,
    )
    spans = simulate(
        models, [BatchPlan(batch=b, route=b, arrival_us=0.0, iterations=(1, 0)) for b in range(2)]
    )
    assert [(s.device, s.route, s.start_us, s.end_us) for s in spans] == [
        ("a", 0, 0.0, 120.0),
        ("b", 1, 0.0, 120.0),
    ]


def test_the_steady_interval_counts_only_while_every_slot_is_in_the_program() -> None:
    spans = simulate(
        [chain(2)], [BatchPlan(batch=b, route=0, arrival_us=0.0, iterations=(2, 9)) for b in range(2)]
    )
    ended = completions(spans)
    found = steady(ended, DECODE, 2)
    assert found.interval_us == pytest.approx(70)
    assert 0 < found.iterations < 18
    assert steady(ended, DECODE, 3).iterations == 0


def test_eight_slots_of_a_long_program_are_simulated_in_under_a_second() -> None:
    import time

    trace = layered_trace(layers=200)
    spread = {str(kernel): "ab"[kernel // 3 % 2] for kernel in range(len(trace.programs[1].kernels))}
    spread["2"] = spread["3"] = "a"
    route = place(trace, {program.name: spread for program in trace.programs}, slots=8, transfer_us=3.0)
    model = plan_routes(make_plan(route, types=TYPES), trace)[0]
    begun = time.process_time()
    interval = steady_interval(model, trace.programs[1].name)
    assert time.process_time() - begun < 1.0
    assert interval >= 2030  # the busier device's kernels
