"""The checker: figures of a small plan by hand, and defects that it must name."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tessera_core.deps.graph import Deps
from tessera_core.execute.cycle import Pace
from tessera_core.plan.evaluate import defects, input_defects, structure_defects
from tessera_core.plan.figures import evaluate, speed
from tessera_core.plan.ir import Home, Plan, Route
from tessera_core.plan.predict import Origin
from tessera_core.plan.stage import PartitionStage, make_plan
from tessera_core.program.boxes import Box
from tessera_core.program.ir import Trace
from tests.plan.graphs import Graph, cluster_of, origin_of, plan_of, times_of


def chain() -> Graph:
    """Three kernels in a row with a weight each, a cache appended to and read, a token fed back."""
    graph = Graph()
    weights = [graph.weight(size) for size in (1000, 2000, 4000)]
    tokens, cache = graph.buffer("input", 8), graph.buffer("state", 5000)
    first, second = graph.buffer("activation", 3000), graph.buffer("activation", 1000)
    out = graph.buffer("output", 8)
    graph.program(
        [
            {"reads": [tokens, weights[0]], "writes": [first], "signature": "a"},
            {"reads": [first], "writes": [cache], "signature": "append", "writer": "copy"},
            {"reads": [first, cache, weights[1]], "writes": [second], "signature": "b"},
            {"reads": [second, weights[2]], "writes": [out], "signature": "c"},
        ],
        inputs={"tokens": tokens},
        outputs={"next": (out, "tokens")},
        state={"cache": cache},
    )
    return graph


TIMES = {("a", "x"): 10.0, ("append", "x"): 1.0, ("b", "x"): 20.0, ("c", "x"): 5.0}


def crossing(**link: Any) -> tuple[Origin, Plan]:
    """Kernels a, b and the append on d0, c on d1, four slots."""
    graph = chain()
    origin = origin_of(graph, times_of(graph.trace(), {"x": 1.0}, us=TIMES), cluster_of(["x", "x"], **link))
    where = {(0, 0): ["d0"], (0, 1): ["d0"], (0, 2): ["d0"], (0, 3): ["d1"]}
    return origin, plan_of(origin, graph.programs, (1,), 4, where)


def test_times_by_hand() -> None:
    origin, plan = crossing(latency_us=2.0, gbit_per_s=8.0, send_us=0.5, receive_us=0.25)
    (it,) = evaluate(plan, origin.trace, origin.deps).iterations
    # d0: segment 1, kernels 31, send 0.5; the token is received by the next iteration.
    assert it.resource_us == pytest.approx(32.5)
    # 0.25 for the token before, 1 + 31 | 0.5, wire 1, latency 2 | 0.25 + 1, c 5 | 0.5, wire 0.008, latency 2.
    assert it.latency_us == pytest.approx(0.25 + 32 + 3.5 + 6.25 + 2.508)
    # Nothing overlaps: each device opens its iteration apart from what it receives.
    assert it.serial_us == pytest.approx(it.latency_us + 2)
    assert it.interval_us == it.resource_us


def test_a_copy_occupies_the_sender() -> None:
    origin, plan = crossing(occupies_sender=True, send_us=0.5)
    (it,) = evaluate(plan, origin.trace, origin.deps).iterations
    assert it.resource_us == pytest.approx(1 + 31 + 0.5 + 1)  # the segment, and a kilobyte out


def test_latency_over_slots_binds_with_few_slots() -> None:
    origin, plan = crossing()
    plan = replace(plan, routes=(replace(plan.routes[0], slots=1),))
    (it,) = evaluate(plan, origin.trace, origin.deps).iterations
    assert it.interval_us == pytest.approx(it.latency_us)
    assert it.interval_us > it.resource_us


def test_memory_by_hand() -> None:
    origin, plan = crossing()
    first, second = evaluate(plan, origin.trace, origin.deps).memory
    assert (first.weight_bytes, first.state_bytes) == (3000, 4 * 5000)
    assert (second.weight_bytes, second.state_bytes) == (4000, 0)
    # Live together at most: first, second, and the output that is only made by the last kernel: 3000 + 1000
    # (kernel b; the input is dead). Each slot also holds what it receives.
    assert first.activation_bytes == 4 * (4000 + 8)
    assert second.activation_bytes == 4 * (4000 + 1000)


def test_a_replicated_writer_runs_on_every_home() -> None:
    graph = chain()
    origin = origin_of(graph, times_of(graph.trace(), {"x": 1.0}, us=TIMES), cluster_of(["x", "x"]))
    where = {(0, 0): ["d0"], (0, 1): ["d0", "d1"], (0, 2): ["d1"], (0, 3): ["d1"]}
    plan = plan_of(origin, graph.programs, (1,), 1, where)
    assert [held.state_bytes for held in evaluate(plan, origin.trace, origin.deps).memory] == [5000, 5000]
    assert sorted(row.buffer for row in plan.transfers) == [5, 7]  # once for two readers; the token back


def test_speeds_of_routes_add() -> None:
    fast = Route(route=0, share=0.0, batch=4, slots=1, programs=("p", "d"), rates=(2, 9))
    slow = Route(route=1, share=0.0, batch=2, slots=3, programs=("p", "d"), rates=(1, 9))
    pace = speed(
        (fast, slow), {0: Pace(cycle_us=100.0, token_us=10.0), 1: Pace(cycle_us=100.0, token_us=30.0)}
    )
    assert pace.requests_per_s == (1e6 * 4 / 100, 1e6 * 2 / 100)
    assert pace.tokens_per_s == pytest.approx(10 * 60_000)
    assert pace.time_per_token_us == pytest.approx(10 * 2 / 3 + 30 / 3)


def test_a_slot_waits_for_its_regions_even_where_nothing_is_fed() -> None:
    graph = Graph()
    tokens, middle, out = graph.buffer("input", 8), graph.buffer("activation", 8), graph.buffer("output", 8)
    graph.program(
        [{"reads": [tokens], "writes": [middle]}, {"reads": [middle], "writes": [out]}],
        inputs={"tokens": tokens},
        outputs={"hidden": (out, None)},
    )
    origin = origin_of(graph, times_of(graph.trace(), {"x": 50.0}), cluster_of(["x", "x"]))
    plan = plan_of(origin, graph.programs, (1,), 1, {(0, 0): ["d0"], (0, 1): ["d1"]})
    (it,) = evaluate(plan, origin.trace, origin.deps).iterations
    assert it.resource_us == pytest.approx(51)
    assert it.latency_us == it.interval_us == pytest.approx(2 * 51 + 2.008)


def halves(**second: Any) -> Plan:
    """An output of two halves, made on different devices."""
    graph = Graph()
    tokens, out = graph.buffer("input", 8), graph.buffer("output", 8)
    cache = graph.buffer("state", 8)
    graph.program(
        [{"reads": [tokens], "writes": [out]}, {"reads": [tokens], "writes": [out], **second}],
        inputs={"tokens": tokens},
        outputs={"next": (out, None)},
        state={"cache": cache},
    )
    origin = origin_of(graph, times_of(graph.trace(), {"x": 9.0}), cluster_of(["x", "x"]))
    plan = plan_of(origin, graph.programs, (1,), 2, {(0, 0): ["d0"], (0, 1): ["d1"]})
    (found,) = structure_defects(plan, origin.trace, origin.deps)
    assert "kernels [0, 1] make output next, so they must share a device" in found
    return make_plan(
        PartitionStage(strategy="placement"), origin.trace, origin.deps, origin.times, origin.cluster
    )


@pytest.mark.parametrize("writer", ["none", "copy"])
def test_all_writers_of_an_output_share_a_device(writer: str) -> None:
    plan = halves(writer=writer)
    assert len({row.device for row in plan.assignments}) == 1


def made() -> tuple[Plan, Trace, Deps]:
    """A sound plan with a prediction, as the stage makes it; kernels on both devices."""
    graph = chain()
    us = {**TIMES, ("c", "x"): 30.0}
    times = times_of(graph.trace(), {"x": 1.0}, us=us)
    cluster = cluster_of(["x", "x"])
    stage = PartitionStage(strategy="placement", in_flight=4)
    plan = make_plan(stage, graph.trace(), graph.deps(), times, cluster)
    assert len({row.device for row in plan.assignments}) == 2 and plan.transfers
    return plan, graph.trace(), graph.deps()


def with_fact(plan: Plan, path: str, value: Any) -> Plan:
    """The plan with one stated figure changed, e.g. ``memory.0.state_bytes``."""

    def changed(item: Any, keys: list[str]) -> Any:
        if not keys:
            return value
        if isinstance(item, list):
            at = int(keys[0])
            return [*item[:at], changed(item[at], keys[1:]), *item[at + 1 :]]
        return {**item, keys[0]: changed(item[keys[0]], keys[1:])}

    return replace(plan, facts=changed(dict(plan.facts), path.split(".")))


def moved(plan: Plan, kernel: int) -> Plan:
    names = [device.name for device in plan.devices]
    return replace(
        plan,
        assignments=tuple(
            replace(row, device=names[1 - names.index(row.device)]) if row.kernel == kernel else row
            for row in plan.assignments
        ),
    )


def first_transfer(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, transfers=(replace(plan.transfers[0], **changes), *plan.transfers[1:]))


SEEDED: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "missing transfer": (lambda p: replace(p, transfers=p.transfers[1:]), "not shipped"),
    "needless transfer": (
        lambda p: replace(p, transfers=(*p.transfers, replace(p.transfers[-1], buffer=0, order=99))),
        "nobody needs it",
    ),
    "transfer twice": (lambda p: replace(p, transfers=(*p.transfers, p.transfers[-1])), "shipped twice"),
    "wrong bytes": (lambda p: first_transfer(p, bytes=1), "bytes is 1"),
    "too few boxes": (lambda p: first_transfer(p, boxes=(Box.interval(0, 8),), bytes=8), "don't cover"),
    "wrong sender": (
        lambda p: first_transfer(p, source=p.transfers[0].destination),
        "does not run its producer",
    ),
    "order backwards": (lambda p: replace(p, transfers=p.transfers[::-1]), "order"),
    "kernel without device": (lambda p: replace(p, assignments=p.assignments[1:]), "has no device"),
    "kernel twice": (lambda p: replace(p, assignments=(*p.assignments, p.assignments[0])), "2 times"),
    "unknown kernel": (
        lambda p: replace(p, assignments=(*p.assignments, replace(p.assignments[0], kernel=77))),
        "not in the trace",
    ),
    "unknown device": (
        lambda p: replace(p, assignments=(replace(p.assignments[0], device="q"), *p.assignments[1:])),
        "unknown device q",
    ),
    "copied kernel": (
        lambda p: replace(
            p,
            assignments=(
                *p.assignments,
                replace(p.assignments[-1], device="d0" if p.assignments[-1].device == "d1" else "d1"),
            ),
        ),
        "no copying state writer",
    ),
    "moved kernel": (lambda p: moved(p, 0), "is not shipped"),
    "writer off its home": (lambda p: moved(p, 1), "not on a home"),
    "writer misses a home": (
        lambda p: replace(
            p,
            homes=(
                *p.homes,
                Home(route=0, state="cache", device="d0" if p.homes[0].device == "d1" else "d1"),
            ),
        ),
        "every home",
    ),
    "homeless state": (lambda p: replace(p, homes=()), "not on a home"),
    "row of no route": (
        lambda p: replace(p, homes=(*p.homes, Home(route=3, state="cache", device="d0"))),
        "unknown route 3",
    ),
    "rates missing": (lambda p: replace(p, routes=(replace(p.routes[0], rates=()),)), "don't fit"),
    "wrong memory": (lambda p: with_fact(p, "memory.0.state_bytes", 7), "state_bytes is 7"),
    "memory over": (
        lambda p: replace(p, devices=tuple(replace(d, capacity_bytes=10) for d in p.devices)),
        "do not fit into 10",
    ),
    "wrong interval": (
        lambda p: with_fact(p, "prediction.intervals.0.interval_us", 1.0),
        "interval_us is 1",
    ),
    "wrong latency": (lambda p: with_fact(p, "prediction.intervals.0.latency_us", 1.0), "latency_us is 1"),
    "wrong throughput": (lambda p: with_fact(p, "prediction.tokens_per_s", 1.0), "tokens_per_s is 1"),
    "wrong objective": (lambda p: with_fact(p, "prediction.objective_us", 1e9), "objective_us is 1e+09"),
    "bound above objective": (lambda p: with_fact(p, "prediction.lower_bound_us", 1e9), "above objective_us"),
    "wrong gap": (lambda p: with_fact(p, "prediction.gap", 0.5), "gap is 0.5"),
    "wrong share": (lambda p: replace(p, routes=(replace(p.routes[0], share=0.4),)), "share is 0.4"),
    "no interval": (lambda p: with_fact(p, "prediction.intervals", []), "no intervals stated"),
    "interval of nothing": (
        lambda p: with_fact(p, "prediction.intervals.0.program", "q"),
        "q: interval of nothing",
    ),
    "link missing": (
        lambda p: with_fact(p, "link", [x for x in p.facts["link"] if x["source"] != p.transfers[0].source]),
        "no links stated from",
    ),
    "all links missing": (
        lambda p: replace(p, facts={k: v for k, v in p.facts.items() if k != "link"}),
        "no link is stated",
    ),
    "overhead twice": (
        lambda p: with_fact(p, "overhead", [*p.facts["overhead"], p.facts["overhead"][0]]),
        "2 segment overheads stated for d0",
    ),
    "other slots": (lambda p: replace(p, routes=(replace(p.routes[0], slots=5),)), "bytes is"),
}


def test_a_sound_plan_has_no_defects() -> None:
    assert defects(*made()) == []


@pytest.mark.parametrize("name", SEEDED)
def test_seeded_defects_are_named(name: str) -> None:
    plan, trace, deps = made()
    seed, expected = SEEDED[name]
    found = defects(seed(plan), trace, deps)
    assert any(expected in line for line in found), found


def test_inputs_are_held_against_profile_and_cluster() -> None:
    plan, trace, _ = made()
    cluster = cluster_of(["x", "x"], latency_us=3.0)
    capacities = {"d0": 10**12, "d1": 1}
    found = input_defects(plan, trace, lambda signature, kind: 1.0, cluster.links, {"x": 2.0}, capacities)
    strange = {**plan.facts["link"][0], "source": "q"}
    facts = {
        **plan.facts,
        "link": [*plan.facts["link"], strange],
        "overhead": [*plan.facts["overhead"], {"device": "q"}],
    }
    found += input_defects(
        replace(plan, facts=facts), trace, lambda *_: 1.0, cluster.links, {"x": 2.0}, capacities
    )
    for expected in (
        "link q to d1, which cluster and profile lack",
        "overhead of q, which cluster",
        "time_us is 30",
        "latency_us is 2, should be 3",
        "overhead of d0",
        "device d1: capacity_bytes",
    ):
        assert any(expected in line for line in found), found
