"""The cycle of a batch of requests: by hand, scaled down, and what reads it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tessera_core.adapt.model import plan_model
from tessera_core.execute import cycle
from tessera_core.execute.cycle import batch_us, simulated_rates, steady_pace
from tessera_core.execute.segments import RouteModel, plan_routes
from tessera_core.execute.simulator import steady_interval
from tessera_core.plan.evaluate import defects
from tessera_core.plan.figures import evaluate, overlap
from tessera_core.plan.ir import Plan
from tessera_core.plan.predict import Origin
from tests.plan.graphs import Graph, cluster_of, origin_of, plan_of, times_of
from tests.plan.test_strategies import layers, plan


def phases(rates: tuple[int, int], slots: int, **link: Any) -> tuple[Origin, Plan, RouteModel]:
    """Two kernels a program: a prefill of 30 and 10 us on d0, a step of 5 us on d0 and 15 us on d1, tokens fed."""
    graph = Graph()
    for phase in ("prefill", "decode"):
        tokens, middle, out = (
            graph.buffer("input", 8),
            graph.buffer("activation", 1000),
            graph.buffer("output", 8),
        )
        graph.program(
            [
                {"reads": [tokens], "writes": [middle], "signature": f"{phase} first"},
                {"reads": [middle], "writes": [out], "signature": f"{phase} last"},
            ],
            phase=phase,
            inputs={"tokens": tokens},
            outputs={"next": (out, "tokens")},
        )
    us = {
        ("prefill first", "x"): 30.0,
        ("prefill last", "x"): 10.0,
        ("decode first", "x"): 5.0,
        ("decode last", "x"): 15.0,
    }
    times = times_of(graph.trace(), {"x": 1.0}, us=us)
    origin = origin_of(graph, times, cluster_of(["x", "x"], **link))
    spots = {(0, 0): ["d0"], (0, 1): ["d0"], (1, 0): ["d0"], (1, 1): ["d1"]}
    made = plan_of(origin, graph.programs, rates, slots, spots)
    return origin, made, plan_routes(made, origin.trace)[0]


def test_a_cycle_by_hand() -> None:
    origin, made, _ = phases((2, 5), 4, latency_us=3.0, send_us=0.5, receive_us=0.25)
    (found,) = evaluate(made, origin.trace, origin.deps).cycles
    # d0: two prompts of 1 + 40; five steps of 1 + 5, each sending 0.5. The tokens that d1 sends back are four,
    # because the last one feeds nothing, and taking them in is not counted, nor is d1's share: 5 * (1 + 15 + 0.25).
    assert found.resource_us == pytest.approx(2 * 41 + 5 * 6.5)
    step = 0.25 + 6 + 0.5 + 1 + 3 + 16.25  # a token taken in (by every step alike), to the end of d1's kernel
    back = 0.5 + 0.008 + 3  # the token, to the start of the next step
    assert found.latency_us == pytest.approx(2 * 41 + 5 * step + 4 * back)
    assert found.interval_us == found.resource_us
    few = replace(made, routes=(replace(made.routes[0], slots=1),))
    (alone,) = evaluate(few, origin.trace, origin.deps).cycles
    assert alone.interval_us == alone.latency_us == found.latency_us


def test_slots_in_different_programs_keep_different_devices_busy() -> None:
    """A full pipeline does better than its programs would by turns, each with all slots in it."""
    origin, made, model = phases((1, 6), 4)
    (bound,) = evaluate(made, origin.trace, origin.deps).cycles
    pace = steady_pace(model, (1, 6), bound.interval_us)
    turns = steady_interval(model, model.programs[0].name) + 6 * steady_interval(
        model, model.programs[1].name
    )
    assert bound.interval_us == pytest.approx(6 * 16)  # d1; d0 has 41 + 6 * 6
    assert bound.interval_us <= pace.cycle_us <= 1.1 * bound.interval_us
    assert turns > 1.3 * bound.interval_us
    assert pace.token_us < 4 * pace.cycle_us / 6  # four batches, of which one prefills now and then


@pytest.mark.parametrize("rates", [(8, 48), (16, 31)])
def test_rates_brought_down_lose_what_the_full_ones_lose(
    monkeypatch: pytest.MonkeyPatch, rates: tuple[int, int]
) -> None:
    origin, made, model = phases(rates, 3, latency_us=8.0)
    (bound,) = evaluate(made, origin.trace, origin.deps).cycles
    full = steady_pace(model, rates, bound.interval_us)
    monkeypatch.setattr(cycle, "LARGEST_SPANS", 600)
    fewer = simulated_rates(model, rates)
    assert sum(fewer) < sum(rates) / 2 and all(fewer)
    scaled = replace(made, routes=(replace(made.routes[0], rates=fewer),))
    (least,) = evaluate(scaled, origin.trace, origin.deps).cycles
    pace = steady_pace(model, fewer, least.interval_us)
    lost, expected = pace.cycle_us / least.interval_us, full.cycle_us / bound.interval_us
    assert lost == pytest.approx(expected, rel=0.05)
    assert pace.token_us == pytest.approx(full.token_us, rel=0.1)


def test_many_iterations_follow_at_the_pace_of_one_slot() -> None:
    """What a long batch takes alone is not simulated to its end, and comes to the same."""
    _, _, model = phases((3, 40), 1, latency_us=8.0)
    repeat = [steady_interval(model, program.name, slots=1) for program in model.programs]
    few, many = batch_us(model, (3, 12), repeat), batch_us(model, (3, 40), repeat)
    assert many == pytest.approx(few + 28 * repeat[1])
    whole = pytest.MonkeyPatch()
    with whole.context() as patch:
        patch.setattr(cycle, "COUNTED", 40)
        assert batch_us(model, (3, 40), repeat) == pytest.approx(many)


def stated(**changes: Any) -> Plan:
    made = plan(layers(prefill=True), {"a": 10.0, "b": 12.0}, strategy="prefill-decode", output_tokens=5)
    cycles: Sequence[dict[str, Any]] = [{**row, **changes} for row in made.facts["prediction"]["cycles"]]
    return replace(made, facts={**made.facts, "prediction": {**made.facts["prediction"], "cycles": cycles}})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"resource_us": 1.0}, "resource_us of the cycle is 1"),
        ({"latency_us": 1.0}, "latency_us of the cycle is 1"),
        ({"interval_us": 1.0}, "interval_us of the cycle is 1"),
        ({"simulated_us": 1.0}, "simulated_us of the cycle is below its bound"),
        ({"token_us": 1.0}, "time_per_token_us"),
        ({"route": 1}, "route 0: no cycles stated"),
    ],
)
def test_the_checker_names_a_wrong_cycle(changes: dict[str, Any], words: str) -> None:
    graph = layers(prefill=True)
    assert defects(stated(), graph.trace(), graph.deps()) == []
    assert any(words in line for line in defects(stated(**changes), graph.trace(), graph.deps()))


def test_adaptation_counts_a_batch_as_its_cycle() -> None:
    made, graph = stated(), layers(prefill=True)
    (row,) = made.facts["prediction"]["cycles"]
    model = plan_model("p", made, graph.trace(), {})
    assert model.work_us(5) * 4 == pytest.approx(row["simulated_us"])
    assert overlap(made)[0] < 1
    facts = {**made.facts, "prediction": {k: v for k, v in made.facts["prediction"].items() if k != "cycles"}}
    assert overlap(replace(made, facts=facts)) == {0: 1.0}
