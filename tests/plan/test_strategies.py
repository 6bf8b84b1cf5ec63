"""Strategies weighed against each other: shares by hand, batches, slots, doubt, and what has no plan."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera_core.plan.confidence import COMMON_VARIANCE, DRAWS, draw_factors
from tessera_core.plan.ir import Plan
from tessera_core.plan.setting import usual_tokens
from tessera_core.plan.stage import PartitionStage, make_plan
from tessera_core.plan.strategies.compare import KNOWN, PLANNED
from tessera_core.profile.times import Condition, TimeRow
from tessera_core.program.ir import Program
from tessera_formats.document import encode_document
from tessera_formats.errors import InfeasibleError, InputError
from tessera_formats.plan import PLAN, STRATEGIES
from tessera_formats.profile import SOURCES
from tests.plan.graphs import Graph, cluster_of, times_of


def layers(
    batches: tuple[int, ...] = (4,), prefill: bool = False, state: int = 1000, depth: int = 3
) -> Graph:
    """A stack of matrix products between an append to and a read of one cache, per decode batch."""
    graph = Graph()
    weights = [graph.weight(10_000) for _ in range(depth)]
    phases = [("prefill", 1)] if prefill else []
    for phase, batch in [*phases, *(("decode", batch) for batch in batches)]:
        tokens = graph.buffer("input", 8 * batch)
        cache = graph.buffer("state", state * batch)
        kernels: list[dict[str, Any]] = []
        last = tokens
        for layer in range(depth):
            out = graph.buffer("activation", 100 * batch)
            kernels.append(
                {
                    "reads": [last, weights[layer]],
                    "writes": [out],
                    "signature": f"{phase}{batch}",
                    "layer": layer,
                }
            )
            last = out
        kernels.append({"reads": [last], "writes": [cache], "writer": "copy", "signature": "append"})
        out = graph.buffer("output", 8 * batch)
        kernels.append({"reads": [last, cache], "writes": [out], "signature": f"{phase}{batch}"})
        graph.program(
            kernels,
            phase=phase,
            batch=batch,
            inputs={"tokens": tokens},
            outputs={"next": (out, "tokens")},
            state={"cache": cache},
        )
    return graph


def plan(
    graph: Graph,
    types: dict[str, float],
    *,
    us: dict[tuple[str, str], float] | None = None,
    spread: float = 1.0,
    capacity: int | list[int] = 10**12,
    kinds: tuple[str, ...] | None = None,
    domain: str | None = None,
    latency_us: float = 2.0,
    **options: Any,
) -> Plan:
    times = times_of(graph.trace(), types, spread=spread, us=us)
    cluster = cluster_of(kinds or tuple(types), capacity, domain=domain, latency_us=latency_us)
    return make_plan(PartitionStage(**options), graph.trace(), graph.deps(), times, cluster)


def row(made: Plan, strategy: str) -> dict[str, Any]:
    return next(row for row in made.facts["compared"] if row["strategy"] == strategy)


def test_shares_follow_speed() -> None:
    # Four kernels and an append: 5 * 10 + 1 against 5 * 30 + 1 microseconds an iteration of 4 tokens.
    made = plan(layers(), {"fast": 10.0, "slow": 30.0}, strategy="data-parallel")
    assert [route.share for route in made.routes] == pytest.approx([151 / 202, 51 / 202])
    assert made.facts["prediction"]["tokens_per_s"] == pytest.approx(4e6 / 51 + 4e6 / 151)
    assert row(made, "single")["tokens_per_s"] == pytest.approx(4e6 / 51)
    assert row(made, "data-parallel")["interval_us"] == pytest.approx(1 / (1 / 51 + 1 / 151))


def test_rates_weigh_prefill_against_decode() -> None:
    made = plan(
        layers(prefill=True),
        {"x": 1.0},
        us={("prefill1", "x"): 100.0, ("decode4", "x"): 10.0},
        strategy="single",
        output_tokens=11,
    )
    assert made.routes[0].rates == (4, 10)
    # Per batch of 4: four prompts of 4 * 100 + 1 + 1, ten steps of 4 * 10 + 1 + 1; 11 tokens each.
    assert made.facts["prediction"]["tokens_per_s"] == pytest.approx(1e6 * 4 * 11 / (4 * 402 + 10 * 42))
    assert made.facts["prediction"]["time_per_token_us"] == pytest.approx(42)


@pytest.mark.parametrize(
    ("prompt", "cache", "tokens"), [(16, 64, 32), (16, 40, 25), (16, 17, 2), (16, 16, 32)]
)
def test_the_usual_answer_fits_the_traced_cache(prompt: int, cache: int, tokens: int) -> None:
    def program(context: int) -> Program:
        return Program(
            id=0, name="p", phase="p", batch=1, context=context, ops=(), kernels=(), io=(), guards=()
        )

    assert usual_tokens(program(prompt), program(cache)) == tokens


def test_each_copy_takes_its_own_best_batch() -> None:
    us = {("decode2", kind): 10.0 for kind in ("big", "small")} | {
        ("decode8", kind): 12.0 for kind in ("big", "small")
    }
    made = plan(
        layers((2, 8)),
        {"big": 1.0, "small": 1.0},
        us=us,
        capacity=[10**9, 30_000 + 2 * 1000 + 1000],
        strategy="data-parallel",
    )
    assert [route.batch for route in made.routes] == [8, 2]


def test_fixed_slots_are_shared_out_and_counted() -> None:
    made = plan(layers(), {"fast": 10.0, "slow": 30.0}, strategy="data-parallel", in_flight=4)
    assert [route.slots for route in made.routes] == [3, 1]
    assert [row(made, s)["slots"] for s in ("single", "data-parallel", "placement")] == [4, 4, 4]


def alternating() -> Graph:
    """Four kernels of two kinds in turns, which no cut into two bands tells apart."""
    graph = Graph()
    buffers = [graph.buffer("input", 8), *(graph.buffer("activation", 8) for _ in range(3))]
    buffers.append(graph.buffer("output", 8))
    graph.program(
        [
            {"reads": [buffers[i]], "writes": [buffers[i + 1]], "signature": ("left", "right")[i % 2]}
            for i in range(4)
        ],
        inputs={"tokens": buffers[0]},
        outputs={"next": (buffers[4], "tokens")},
    )
    return graph


def test_placement_wins_where_each_device_has_its_own_strength() -> None:
    # Half the kernels are ten times faster here, half there: copies can't use that, placement can.
    graph = alternating()
    us = {("left", "a"): 100.0, ("left", "b"): 1000.0, ("right", "a"): 1000.0, ("right", "b"): 100.0}
    made = plan(graph, {"a": 1.0, "b": 1.0}, us=us, spread=1.2)
    assert made.facts["strategy"] == "placement"
    assert made.facts["prediction"]["probability_best"] > 0.95
    assert [item.device for item in made.assignments] == ["d0", "d1"] * 2
    assert made.facts["prediction"]["gap"] < 0.02


def test_auto_stays_with_the_baseline_where_times_are_too_vague() -> None:
    # Kernels of 100 and 90 us, swapped: placement gains a few percent by formula and nothing for sure.
    graph = alternating()
    us = {("left", "a"): 900.0, ("left", "b"): 1000.0, ("right", "a"): 1000.0, ("right", "b"): 900.0}
    sure = plan(graph, {"a": 1.0, "b": 1.0}, us=us, spread=1.0001, latency_us=0.1)
    vague = plan(graph, {"a": 1.0, "b": 1.0}, us=us, spread=1.5, latency_us=0.1)
    assert sure.facts["strategy"] == "placement"
    assert vague.facts["strategy"] == "data-parallel"
    assert row(vague, "placement")["tokens_per_s"] > row(vague, "data-parallel")["tokens_per_s"]
    assert row(vague, "placement")["probability_best"] <= 0.9


def times_between(low: float, high: float, kind: str, signatures: int, source: str) -> list[TimeRow]:
    """Times of several kernels on one device type, each with the median 100 us and that interval."""
    graph = Graph()
    graph.program([{"reads": [graph.buffer("input", 8)], "writes": []} for _ in range(signatures)])
    rows = times_of(graph.trace(), {kind: 100.0}, source=source).rows.values()
    return [replace(row, low_us=low, high_us=high) for (row,) in rows]


@pytest.mark.parametrize("source", ["measured", "modelled"])
def test_draws_are_paired_and_centred_on_the_median(source: str) -> None:
    (row,) = times_between(50.0, 200.0, "a100-80gb", 1, source)
    factors = draw_factors(row)
    assert factors.shape == (DRAWS,)
    assert np.array_equal(factors, draw_factors(row))
    assert not np.array_equal(factors, draw_factors(replace(row, device_type="l40s")))
    assert np.median(factors) == pytest.approx(1.0, abs=0.15)
    assert np.mean((factors > 0.5) & (factors < 2.0)) == pytest.approx(0.9, abs=0.05)


def test_many_kernels_average_out_measured_errors_but_not_those_of_a_model() -> None:
    """The 90% interval of 100 kernels' total, over its median: the common half of the variance remains."""

    def spread(source: str) -> float:
        drawn = np.mean([draw_factors(row) for row in times_between(50.0, 200.0, "x", 100, source)], axis=0)
        low, high = np.quantile(drawn, [0.05, 0.95])
        return float(np.log(high / low))

    assert spread("measured") < 0.25 < np.log(4) * np.sqrt(COMMON_VARIANCE) * 0.8 < spread("modelled")


def test_latency_is_weighed_alone_and_copies_do_not_shorten_it() -> None:
    """Beside a neighbour the kernels happened to be measured faster."""
    graph = layers()
    quiet = times_of(graph.trace(), {"x": 10.0})
    rows = {
        key: (row, replace(row, condition="beside", median_us=8.0, low_us=8.0, high_us=8.0))
        for key, (row,) in quiet.rows.items()
    }
    made = {
        policy: make_plan(
            PartitionStage(policy=policy),
            graph.trace(),
            graph.deps(),
            replace(quiet, rows=rows),
            cluster_of(("x", "x")),
        )
        for policy in ("latency", "throughput")
    }
    latency, throughput = made["latency"], made["throughput"]
    assert (latency.facts["strategy"], latency.facts["condition"]) == ("single", "alone")
    assert {row(latency, s)["latency_us"] for s in ("single", "data-parallel")} == {51.0}
    assert (throughput.facts["strategy"], throughput.facts["condition"]) == ("data-parallel", "beside")
    assert row(throughput, "data-parallel")["latency_us"] == 41.0


def test_copies_are_weighed_beside_copies_and_a_placement_beside_its_other_half() -> None:
    graph = layers()
    quiet = times_of(graph.trace(), {"x": 10.0})

    def under(row: TimeRow, condition: Condition, median_us: float) -> TimeRow:
        return replace(row, condition=condition, median_us=median_us, low_us=median_us, high_us=median_us)

    rows = {
        key: (row, under(row, "beside", 11.0), under(row, "copies", 13.0))
        for key, (row,) in quiet.rows.items()
    }
    for strategy, condition, time_us in (("data-parallel", "copies", 13.0), ("placement", "beside", 11.0)):
        made = make_plan(
            PartitionStage(policy="throughput", strategy=strategy),
            graph.trace(),
            graph.deps(),
            replace(quiet, rows=rows),
            cluster_of(("x", "x")),
        )
        assert made.facts["condition"] == condition
        assert {item.time_us for item in made.assignments} == {time_us}


def test_a_plan_states_the_condition_that_its_profile_has() -> None:
    made = plan(layers(), {"x": 10.0}, kinds=("x", "x"), strategy="placement")
    assert made.facts["condition"] == "alone"


def test_each_strategy_says_how_much_of_it_was_measured() -> None:
    graph = layers()
    fast = times_of(graph.trace(), {"fast": 10.0}, source="measured")
    slow = times_of(graph.trace(), {"slow": 30.0}, source="silicon")
    both = replace(fast, rows={**fast.rows, **slow.rows}, devices={**fast.devices, **slow.devices})
    cluster = cluster_of(("fast", "slow"))
    made = make_plan(PartitionStage(strategy="data-parallel"), graph.trace(), graph.deps(), both, cluster)
    shares = {s: [row(made, s)[f"{kind}_share"] for kind in SOURCES] for s in ("single", "data-parallel")}
    assert shares["single"] == [1.0, 0.0, 0.0]
    # Time per request, weighted by share: the slow device takes 3 times as long for a quarter of them, nearly.
    assert shares["data-parallel"] == pytest.approx(
        [50 * 151 / (50 * 151 + 150 * 51), 150 * 51 / (50 * 151 + 150 * 51), 0.0]
    )


def test_placement_serves_what_no_device_holds() -> None:
    made = plan(layers(), {"x": 10.0}, kinds=("x", "x"), capacity=30_000)
    assert made.facts["strategy"] == "pipeline"  # and no placement is better
    assert row(made, "placement")["tokens_per_s"] == row(made, "pipeline")["tokens_per_s"]
    assert not row(made, "single")["feasible"] and not row(made, "data-parallel")["feasible"]
    assert "short" in row(made, "single")["reason"]
    assert all(r["weight_bytes"] + r["state_bytes"] <= 30_000 for r in made.facts["memory"])


def test_copies_that_share_a_memory_must_fit_together() -> None:
    made = plan(layers(), {"x": 10.0}, kinds=("x", "x"), capacity=60_000, domain="host")
    assert row(made, "single")["feasible"]
    assert not row(made, "data-parallel")["feasible"]
    assert "share" in row(made, "data-parallel")["reason"]


@pytest.mark.parametrize(
    ("options", "capacity", "words"),
    [
        ({}, 10_000, ("no strategy has a plan", "weights", "d0, d1 together", "short", "memory")),
        (
            {"strategy": "single"},
            20_000,
            ("strategy single has no plan", "weights alone", "--strategy placement"),
        ),
        ({"strategy": "single"}, 33_000, ("trace with batch",)),
        ({"strategy": "single", "in_flight": 9}, 45_000, ("use --in-flight",)),
        ({"strategy": "data-parallel", "in_flight": 1}, 10**9, ("at least 2 batches in flight",)),
    ],
)
def test_what_does_not_fit_is_said_on_one_line(
    options: dict[str, Any], capacity: int, words: tuple[str, ...]
) -> None:
    with pytest.raises(InfeasibleError) as refusal:
        plan(layers(), {"x": 10.0}, kinds=("x", "x"), capacity=capacity, **options)
    assert "\n" not in str(refusal.value)
    for word in words:
        assert word in str(refusal.value)


def test_later_strategies_are_known_and_refused() -> None:
    with pytest.raises(InputError, match="strategy split is planned for a later version; use"):
        plan(layers(), {"x": 1.0}, strategy="split")


def test_every_name_of_a_plan_is_a_strategy() -> None:
    assert {"auto", *PLANNED, *(strategy.name for strategy in KNOWN)} == set(STRATEGIES)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "best"}, "strategy 'best' is not known; use one of auto"),
        ({"policy": "speed"}, "policy 'speed'"),
    ],
)
def test_unknown_names_list_the_known(options: dict[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        plan(layers(), {"x": 1.0}, **options)


def test_phases_that_no_route_joins_are_refused() -> None:
    graph = layers()
    tokens = graph.buffer("input", 8)
    graph.program([{"reads": [tokens], "writes": []}], phase="encode")
    with pytest.raises(InputError, match="phases decode, encode"):
        plan(graph, {"x": 1.0})


def test_latency_plans_avoid_crossings() -> None:
    made = plan(layers(), {"fast": 10.0, "slow": 11.0}, policy="latency")
    assert {item.device for item in made.assignments} == {"d0"}
    assert made.facts["prediction"]["objective_us"] == pytest.approx(51)


def test_equal_inputs_give_equal_bytes() -> None:
    graph = layers((2, 4), prefill=True, depth=8)
    us = {(f"decode{b}", kind): t for b in (2, 4) for kind, t in (("a", 10.0), ("b", 13.0))}
    made = [plan(graph, {"a": 20.0, "b": 25.0}, us=us, spread=1.3) for _ in range(2)]
    first, second = (encode_document(PLAN, item.document(), "plan") for item in made)
    assert first == second
