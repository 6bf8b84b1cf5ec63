"""The solvers' fast models of cost against the plain one, and their bounds against every placement of small graphs."""

from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tessera_core.plan.columns import mix, whole_floor_us
from tessera_core.plan.cut import CutModel, cut_model
from tessera_core.plan.loads import load_model
from tessera_core.plan.moves import Moves
from tessera_core.plan.placement import Cost, Placement, cost, settled, single, trimmed
from tessera_core.plan.predict import Origin
from tessera_core.plan.problem import Problem
from tessera_core.plan.search import improved
from tessera_core.plan.types import between_types, types_of
from tests.plan.graphs import Graph, cluster_of, origin_of, times_of
from tests.plan.test_optimality import cases, graphs, problem_of

Case = tuple[Graph, Origin, tuple[int, ...]]
SLACK = 1 + 1e-6


def somewhere(problem: Problem, random: Random) -> list[int]:
    return [random.randrange(len(problem.devices)) for _ in problem.units]


def all_placements(problem: Problem) -> list[Placement]:
    """Every device for every unit that is placed by itself; state writers follow, as in any sensible placement."""
    count = len(problem.devices)
    free = [1 if unit.replicable else count for unit in problem.units]
    return list(
        dict.fromkeys(
            settled(problem, list(spots)) for spots in product(*(range(choices) for choices in free))
        )
    )


def least_us(problem: Problem) -> float:
    """The least interval of the placements that fit."""
    found = [cost(problem, placement) for placement in all_placements(problem)]
    return min((f.interval_us(problem.slots) for f in found if not f.excess_bytes), default=float("inf"))


def check_cut(model: CutModel, row: np.ndarray, figures: Cost) -> None:
    """Crossings along the fed path cost at most what they do, so that its column bounds."""
    problem, resources = model.problem, model.resources
    wires = [figures.cycle_wires_us.get(pair, 0.0) for pair in ((0, 1), (1, 0))]
    assert row[[0, 1]] == pytest.approx(figures.cycle_loads_us)
    assert row[[2, 3]] == pytest.approx(wires)
    assert row[resources.path] <= figures.cycle_path_us / problem.slots * SLACK
    assert row[resources.memory(0) : resources.memory(len(problem.domains))] == pytest.approx(
        figures.domain_bytes
    )
    assert row[resources.serial] == pytest.approx(figures.latency_us(problem.rates))


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_a_cut_severs_what_the_placement_costs(case: Case, slots: int, random: Random) -> None:
    _, origin, rates = case
    problem = problem_of(origin, rates, slots)
    model = cut_model(problem)
    devices = [somewhere(problem, random) for _ in range(4)]
    placements = [trimmed(problem, settled(problem, spots)) for spots in devices]
    for row, placement in zip(model.loads(placements), placements, strict=True):
        check_cut(model, row, cost(problem, placement))
    for row, spots in zip(model.loads_of(np.array(devices)), devices, strict=True):
        check_cut(model, row, cost(problem, trimmed(problem, settled(problem, spots))))


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 3).flatmap(cases), st.integers(1, 4), st.randoms(use_true_random=False))
def test_arrays_cost_what_the_placement_costs(case: Case, slots: int, random: Random) -> None:
    _, origin, rates = case
    problem = problem_of(origin, rates, slots)
    model = load_model(problem)
    for _ in range(4):
        spots = somewhere(problem, random)
        figures, load = cost(problem, settled(problem, spots)), model.load(np.array(spots))
        assert load.devices_us == pytest.approx(figures.cycle_loads_us)
        assert load.wires_us.max() == pytest.approx(max([*figures.cycle_wires_us.values(), 0.0]))
        assert load.path_us == pytest.approx(figures.cycle_path_us)
        assert load.memory_bytes == pytest.approx(figures.domain_bytes)
        if not figures.excess_bytes:
            assert model.objective_us(load) == pytest.approx(figures.interval_us(slots))


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_moves_keep_the_cost_up_to_date(case: Case, slots: int, random: Random) -> None:
    _, origin, rates = case
    problem = problem_of(origin, rates, slots)
    at = Moves(problem, somewhere(problem, random))
    assume(at.movable)
    for _ in range(12):
        at.move(random.choice(at.movable), random.randrange(len(problem.devices)))
        figures = cost(problem, settled(problem, at.devices))
        assert at.loads_us == pytest.approx(figures.cycle_loads_us)
        assert [at.wires_us[s][d] for s, d in problem.links] == pytest.approx(
            [figures.cycle_wires_us.get(pair, 0.0) for pair in problem.links]
        )
        assert at.path_us == pytest.approx(figures.cycle_path_us)
        assert at.memory_bytes == list(figures.domain_bytes)
        assert at.excess_bytes == figures.excess_bytes
        assert at.objective_us == pytest.approx(figures.interval_us(slots))


@settings(max_examples=25, deadline=None)
@given(cases(), st.integers(1, 4))
def test_mixes_and_whole_kernels_bound_every_placement(case: Case, slots: int) -> None:
    _, origin, rates = case
    problem = problem_of(origin, rates, slots)
    least = least_us(problem)
    floor = whole_floor_us(problem, (1, 1))
    mixed = mix(cut_model(problem), [single(problem, d) for d in (0, 1)], 1e-6, floor)
    assert floor <= least * SLACK
    assert mixed.bound_us <= least * SLACK
    assert mixed.bound_us <= mixed.objective_us * SLACK
    assert mixed.shares.sum() == pytest.approx(1.0)


@st.composite
def two_types(draw: st.DrawFn) -> Problem:
    """Three or four devices of two types, alike in memory."""
    graph, rates = draw(graphs(1))
    kinds = draw(st.sampled_from([("fast", "slow", "slow"), ("fast", "fast", "slow", "slow")]))
    total = sum(buffer.bytes for buffer in graph.buffers)
    signatures = sorted({k.signature for p in graph.programs for k in p.kernels})
    us = {(s, kind): float(draw(st.integers(1, 30))) for s in signatures for kind in ("fast", "slow")}
    cluster = cluster_of(
        kinds,
        draw(st.sampled_from([8 * total, total, total // 2])),
        send_us=draw(st.sampled_from([0.0, 1.5])),
        occupies_sender=draw(st.booleans()),
    )
    times = times_of(graph.trace(), {"fast": 1.0, "slow": 1.0}, us=us)
    return problem_of(origin_of(graph, times, cluster), rates, draw(st.integers(1, 4)))


@settings(max_examples=15, deadline=None)
@given(two_types())
def test_the_bound_between_types_holds_for_their_devices(problem: Problem) -> None:
    types = types_of(problem)
    assert len(types.members) == 2
    between, copies = between_types(problem, types), (types.copies[0], types.copies[1])
    floor = whole_floor_us(between, copies)
    mixed = mix(cut_model(between, copies), [single(between, d) for d in (0, 1)], 1e-6, floor)
    least = least_us(problem)
    assert floor <= least * SLACK
    assert mixed.bound_us <= least * SLACK


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 3).flatmap(cases), st.randoms(use_true_random=False))
def test_search_is_never_worse_than_its_start(case: Case, random: Random) -> None:
    _, origin, rates = case
    problem = problem_of(origin, rates, 4)
    start = somewhere(problem, random)
    before = cost(problem, settled(problem, start))
    assume(not before.excess_bytes)
    found = improved(problem, start, list(range(len(start))), 300, hottest=0.01, enough_us=0.0)
    after = cost(problem, settled(problem, found))
    assert not after.excess_bytes
    assert after.interval_us(4) <= before.interval_us(4) * SLACK
