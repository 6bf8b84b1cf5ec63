"""Baselines as placements: bands of layers, prefill apart from decode, attention apart from the rest."""

from typing import Any

import pytest

from tessera_core.plan.ir import Plan
from tessera_core.plan.stage import PartitionStage, make_plan
from tessera_core.plan.strategies.placed import split_groups
from tessera_formats.errors import InfeasibleError
from tests.plan.graphs import Graph, cluster_of, times_of
from tests.plan.test_strategies import layers, plan, row

PHASES = {("prefill1", "a"): 10.0, ("prefill1", "b"): 40.0, ("decode4", "a"): 40.0, ("decode4", "b"): 10.0}


def where(made: Plan) -> dict[str, set[str]]:
    """Program -> devices of its kernels that write no state."""
    found: dict[str, set[str]] = {}
    for (_, program), kernels in made.placement.items():
        found[program] = {kernels[k][0] for k in kernels if len(kernels[k]) == 1}
    return found


def test_prompts_and_tokens_on_the_device_that_suits_each() -> None:
    made = plan(
        layers(prefill=True),
        {"a": 1.0, "b": 1.0},
        us=PHASES,
        strategy="prefill-decode",
        output_tokens=5,
        in_flight=4,
    )
    prefill, decode = made.routes[0].programs
    assert where(made) == {prefill: {"d0"}, decode: {"d1"}}
    # The cache lives on both, and both append to it: prompts reach the decoding device in this way.
    assert {home.device for home in made.homes} == {"d0", "d1"}
    for name in (prefill, decode):
        assert made.placement[0, name][3] == ("d0", "d1")
    # A batch of 4: four prompts of 4 * 10 + 1 + 1 on d0, beside four appends of 1 + 1 for the steps on d1;
    # four steps of 4 * 10 + 1 + 1 on d1, beside four of the prompts' appends.
    (cycle,) = made.facts["prediction"]["cycles"]
    assert cycle["resource_us"] == pytest.approx(4 * 42 + 4 * 2)
    assert cycle["resource_us"] <= cycle["simulated_us"] <= 1.1 * cycle["resource_us"]
    assert made.facts["prediction"]["tokens_per_s"] == pytest.approx(1e6 * 4 * 5 / cycle["simulated_us"])
    assert made.facts["prediction"]["tokens_per_s"] > 1.5 * row(made, "data-parallel")["tokens_per_s"]
    # Little's law: four batches are in the pipeline, each for a prefill and four steps.
    token_us = made.facts["prediction"]["time_per_token_us"]
    assert 42 < token_us < cycle["simulated_us"]


def test_the_better_direction_is_taken() -> None:
    swapped = {(name, {"a": "b", "b": "a"}[kind]): time for (name, kind), time in PHASES.items()}
    made = plan(
        layers(prefill=True), {"a": 1.0, "b": 1.0}, us=swapped, strategy="prefill-decode", output_tokens=5
    )
    prefill, decode = made.routes[0].programs
    assert where(made) == {prefill: {"d1"}, decode: {"d0"}}


def test_groups_of_devices_share_a_phase() -> None:
    made = plan(
        layers(prefill=True, depth=8),
        {"a": 1.0, "b": 1.0},
        us=PHASES,
        kinds=("a", "b", "a", "b"),
        strategy="prefill-decode",
        output_tokens=5,
    )
    prefill, decode = made.routes[0].programs
    assert where(made) == {prefill: {"d0", "d2"}, decode: {"d1", "d3"}}


def test_auto_takes_a_baseline_that_nothing_beats_for_sure() -> None:
    made = plan(layers(prefill=True), {"a": 1.0, "b": 1.0}, us=PHASES, spread=1.2, output_tokens=5)
    chosen = made.facts["strategy"]
    best = max(r["tokens_per_s"] for r in made.facts["compared"] if r["strategy"] != "placement")
    assert row(made, chosen)["tokens_per_s"] >= best
    assert row(made, "prefill-decode")["tokens_per_s"] > row(made, "data-parallel")["tokens_per_s"]


def recurrent() -> Graph:
    """Prefill and decode over one state that each computes, as a recurrence does."""
    graph = Graph()
    for phase in ("prefill", "decode"):
        tokens, state, out = graph.buffer("input", 8), graph.buffer("state", 8), graph.buffer("output", 8)
        graph.program(
            [
                {"reads": [tokens, state], "writes": [state], "writer": "compute"},
                {"reads": [tokens, state], "writes": [out]},
            ],
            phase=phase,
            inputs={"tokens": tokens},
            outputs={"next": (out, "tokens")},
            state={"ssm": state},
        )
    return graph


def attending(depth: int = 4) -> Graph:
    """Layers of a product, an append to the layer's cache, attention over it, and a product."""
    graph = Graph()
    last = tokens = graph.buffer("input", 8)
    kernels: list[dict[str, Any]] = []
    caches = {f"cache{layer}": graph.buffer("state", 1000) for layer in range(depth)}
    for layer, cache in enumerate(caches.values()):
        query, mixed = graph.buffer("activation", 8), graph.buffer("activation", 8)
        final = graph.buffer("output" if layer == depth - 1 else "activation", 8)
        kernels += [
            {"reads": [last], "writes": [query], "signature": "product", "layer": layer},
            {"reads": [query], "writes": [cache], "signature": "append", "writer": "copy", "layer": layer},
            {
                "reads": [query, cache],
                "writes": [mixed],
                "signature": "attend",
                "kind": "attention",
                "layer": layer,
            },
            {"reads": [mixed], "writes": [final], "signature": "product", "layer": layer},
        ]
        last = final
    graph.program(kernels, inputs={"tokens": tokens}, outputs={"next": (last, "tokens")}, state=caches)
    return graph


def test_attention_and_its_caches_apart_from_the_rest() -> None:
    us = {("attend", "a"): 30.0, ("attend", "b"): 10.0, ("product", "a"): 5.0, ("product", "b"): 20.0}
    made = plan(attending(), {"a": 1.0, "b": 1.0}, us=us, strategy="attention-ffn", latency_us=0.1)
    (placed,) = made.placement.values()
    assert {placed[4 * layer + 2] for layer in range(4)} == {("d1",)}
    assert {placed[4 * layer + 1] for layer in range(4)} == {("d1",)}
    assert {placed[4 * layer + k] for layer in range(4) for k in (0, 3)} == {("d0",)}
    assert {home.device for home in made.homes} == {"d1"}
    assert row(made, "attention-ffn")["tokens_per_s"] > row(made, "pipeline")["tokens_per_s"]


def test_a_pipeline_is_cut_where_its_halves_take_equally_long() -> None:
    made = plan(layers(depth=9), {"fast": 10.0, "slow": 20.0}, strategy="pipeline", latency_us=0.1)
    (placed,) = made.placement.values()
    devices = [placed[k][0] for k in sorted(placed)]
    assert devices == sorted(devices, reverse=devices[0] == "d1")
    # Eleven kernels of 10 or 20 us and a segment of 1 us: seven and four, or eight and three.
    assert made.facts["prediction"]["cycles"][0]["resource_us"] == pytest.approx(81)
    assert row(made, "placement")["tokens_per_s"] >= row(made, "pipeline")["tokens_per_s"] * (1 - 1e-9)


@pytest.mark.parametrize(
    ("graph", "strategy", "words"),
    [
        (recurrent(), "prefill-decode", "state ssm is computed, not copied into, so it has one home"),
        (layers(), "prefill-decode", "holds one phase \\(decode\\) alone"),
        (layers(), "attention-ffn", "the model has no attention kernel"),
    ],
)
def test_what_cannot_be_split_is_refused_with_a_reason(graph: Graph, strategy: str, words: str) -> None:
    with pytest.raises(InfeasibleError, match=words) as refusal:
        plan(graph, {"a": 1.0, "b": 1.0}, strategy=strategy)
    assert "\n" not in str(refusal.value)
    made = plan(graph, {"a": 1.0, "b": 1.0}, strategy="single")
    assert not row(made, strategy)["feasible"]


def test_a_split_that_memory_forbids_says_by_how_much() -> None:
    with pytest.raises(InfeasibleError, match=r"no split of prefill and decode fits the memory: .* GB over"):
        plan(layers(prefill=True), {"a": 1.0, "b": 1.0}, capacity=20_000, strategy="prefill-decode")


def test_one_device_has_nothing_to_split() -> None:
    for strategy in ("pipeline", "prefill-decode", "attention-ffn"):
        with pytest.raises(InfeasibleError, match="the cluster has one device"):
            plan(layers(prefill=True), {"a": 1.0}, strategy=strategy)


def test_devices_are_parted_by_type_and_a_few_at_any_point() -> None:
    assert split_groups(("a", "b")) == [((0,), (1,)), ((1,), (0,))]
    assert split_groups(("a", "b", "a")) == [
        ((0,), (1, 2)),
        ((1, 2), (0,)),
        ((0, 2), (1,)),
        ((1,), (0, 2)),
    ]
    assert split_groups(("b", "a") * 3) == [((1, 3, 5), (0, 2, 4)), ((0, 2, 4), (1, 3, 5))]
    assert split_groups(("a",) * 6)[0] == ((0, 1, 2), (3, 4, 5))


@pytest.mark.parametrize("policy", ["throughput", "latency"])
def test_every_baseline_is_a_sound_plan(policy: str) -> None:
    """``make_plan`` checks each with the independent evaluator, and the figures of both agree."""
    graph = layers(prefill=True)
    times = times_of(graph.trace(), {"a": 1.0, "b": 1.0}, us=PHASES)
    for strategy in ("pipeline", "prefill-decode"):
        stage = PartitionStage(policy=policy, strategy=strategy)
        made = make_plan(stage, graph.trace(), graph.deps(), times, cluster_of(("a", "b"), send_us=0.5))
        assert made.facts["strategy"] == strategy
        assert made.facts["prediction"]["lower_bound_us"] <= made.facts["prediction"]["objective_us"]
