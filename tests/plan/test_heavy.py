"""What is too heavy to cross between types: bounds that know it hold for every placement, and say more."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_core.plan.columns import Mixed, mix, whole_floor_us
from tessera_core.plan.cut import cut_model
from tessera_core.plan.heavy import branched, confined, crossing_us
from tessera_core.plan.loads import load_model
from tessera_core.plan.placement import single, starting_points
from tessera_core.plan.problem import Problem
from tessera_core.plan.throughput import minimise, relaxed_bound_us
from tessera_core.plan.types import NEARNESS, PIECES, between_types, expanded, packed, types_of
from tests.plan.graphs import Graph, cluster_of, origin_of, times_of
from tests.plan.test_models import SLACK, least_us, two_types
from tests.plan.test_optimality import problem_of

KINDS = ("fast", "fast", "slow", "slow")


def slower(problem: Problem, factor: float) -> Problem:
    """The problem with all links slower."""
    links = {pair: replace(link, gbit_per_s=link.gbit_per_s / factor) for pair, link in problem.links.items()}
    return replace(problem, links=links)


def mixed_of(copies: tuple[int, int], floor_us: float, problem: Problem) -> Mixed:
    """The mix that bounds a problem of two types."""
    return mix(cut_model(problem, copies), [single(problem, d) for d in (0, 1)], 1e-6, floor_us)


def bounds(problem: Problem) -> tuple[float, float]:
    """The bound of two types without knowing what cannot cross, and with."""
    types = types_of(problem)
    between, copies = between_types(problem, types), (types.copies[0], types.copies[1])
    floor = whole_floor_us(between, copies)
    plain = mixed_of(copies, floor, between).bound_us
    return plain, branched(between, plain, lambda of: mixed_of(copies, floor, of))[0]


def chain(kernels: int, size: int, gbit_per_s: float) -> Problem:
    """A chain of equal kernels, twice as fast on one type, whose every step hands on so many bytes."""
    graph = Graph()
    last = graph.buffer("input", 8)
    rows = []
    for number in range(kernels):
        rows.append({"reads": [last], "writes": [last := graph.buffer("activation", size)], "layer": number})
    graph.program(rows, inputs={"x": 0}, outputs={"y": (last, None)})
    times = times_of(graph.trace(), {"fast": 10.0, "slow": 20.0})
    problem = problem_of(origin_of(graph, times, cluster_of(KINDS, 10**9)), (1,), 16)
    links = {
        pair: replace(link, gbit_per_s=1e6 if KINDS[pair[0]] == KINDS[pair[1]] else gbit_per_s)
        for pair, link in problem.links.items()
    }
    return replace(problem, links=links)


@settings(max_examples=20, deadline=None)
@given(two_types(), st.sampled_from([1.0, 30.0, 1000.0]))
def test_what_cannot_cross_bounds_every_placement(problem: Problem, factor: float) -> None:
    problem = slower(problem, factor)
    plain, knowing = bounds(problem)
    assert plain <= knowing * SLACK
    assert knowing <= least_us(problem) * SLACK


@settings(max_examples=10, deadline=None)
@given(two_types(), st.sampled_from([1.0, 1000.0]), st.floats(1.0, 3.0))
def test_what_is_confined_bounds_all_that_are_better(problem: Problem, factor: float, over: float) -> None:
    problem = replace(slower(problem, factor), domains=())
    least = least_us(problem)
    sides = confined(problem, types_of(problem), least * over)
    assert all(not side.flows for side in sides)
    assert min(relaxed_bound_us(side, "interval") for side in sides) <= least * SLACK


def test_a_chain_that_cannot_cross_stays_on_the_faster_type() -> None:
    problem = chain(
        kernels=12, size=1_000_000, gbit_per_s=1.0
    )  # 8,000 us to cross; 120 us on one fast device
    assert min(crossing_us(problem, flow) for flow in problem.flows) < 120.0  # within a type
    plain, knowing = bounds(problem)
    assert plain == pytest.approx(40.0, rel=0.05)  # as if a third of the batches went to the slow type
    assert knowing == pytest.approx(60.0, rel=0.05)
    found = minimise(problem, "interval", starting_points(problem))
    assert found.objective_us <= knowing * 1.2
    assert knowing == pytest.approx(found.bound_us, rel=0.05)


def test_nothing_heavy_leaves_the_bound_as_it_was() -> None:
    problem = chain(kernels=12, size=8, gbit_per_s=100.0)
    plain, knowing = bounds(problem)
    assert knowing == plain


@settings(max_examples=20, deadline=None)
@given(two_types(), st.integers(1, 8), st.randoms(use_true_random=False))
def test_pieces_stay_on_their_type_and_even_it_out(problem: Problem, pieces: int, random: Random) -> None:
    types, model = types_of(problem), load_model(problem)
    chosen = [random.randrange(2) for _ in problem.units]
    order = np.arange(len(chosen))
    devices = packed(model, types, chosen, order, pieces)
    weights = [problem.cycle_times[unit][int(device)] for unit, device in enumerate(devices)]
    for t, members in enumerate(types.members):
        own = [unit for unit, kind in enumerate(chosen) if kind == t]
        assert {int(devices[unit]) for unit in own} <= set(members)
        loads = [sum(weights[u] for u in own if devices[u] == d) for d in members]
        share = sum(loads) / len(members)
        piece = max(share / pieces, max((weights[u] for u in own), default=0.0))
        assert max(loads) <= share + piece * (1 + NEARNESS)
    best = expanded(model, types, chosen, order)
    if pieces in PIECES:
        assert model.objective_us(model.load(best)) <= model.objective_us(model.load(devices)) * SLACK
