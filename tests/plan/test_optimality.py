"""The solvers against brute force: every placement of small random graphs, weighed by the checker."""

from collections.abc import Iterator
from itertools import combinations, product
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tessera_core.execute.segments import plan_routes
from tessera_core.execute.simulator import BatchPlan, completions, simulate
from tessera_core.plan import solver
from tessera_core.plan.cluster import Cluster
from tessera_core.plan.evaluate import structure_defects
from tessera_core.plan.figures import Evaluation, evaluate
from tessera_core.plan.needs import program_needs
from tessera_core.plan.placement import settled, single, starting_points, trimmed
from tessera_core.plan.predict import Origin, RouteChoice, predicted
from tessera_core.plan.problem import Problem, build_problem
from tessera_core.plan.setting import Setting
from tessera_core.plan.solver import Effort
from tessera_core.plan.strategies.compare import compare
from tessera_core.plan.throughput import minimise, relaxed_bound_us
from tests.plan.graphs import Graph, cluster_of, origin_of, plan_of, times_of

EXACT = Effort(gap=1e-7, nodes=100_000)
MANY = 64  # slots enough that no latency binds


@st.composite
def graphs(draw: st.DrawFn, most: int = 2) -> tuple[Graph, tuple[int, ...]]:
    """One or two programs that share weights and a state family, which each appends to and reads."""
    graph = Graph()
    weights = [graph.weight(draw(st.integers(1, 9)) * 1000) for _ in range(2)]
    programs = draw(st.integers(1, most))
    stateful, computed = draw(st.booleans()), draw(st.booleans())
    summed = stateful and draw(st.booleans())  # a second family, appended to from the first
    for number in range(programs):
        tokens = graph.buffer("input", 8)
        kernels: list[dict[str, Any]] = [
            {"reads": [tokens, weights[0]], "writes": [graph.buffer("activation", 500)]}
        ]
        made = [kernels[0]["writes"][0]]
        for _ in range(draw(st.integers(1, 3 if (programs, most) == (1, 2) else 2))):
            reads = draw(st.lists(st.sampled_from(made), min_size=1, max_size=2, unique=True))
            extra = draw(st.sampled_from([[], [weights[1]]]))
            out = graph.buffer("activation", draw(st.integers(1, 4)) * 1000)
            kernels.append({"reads": [*reads, *extra], "writes": [out]})
            made.append(out)
        state = {}
        if stateful:
            cache = graph.buffer("state", 3000)
            state = {"cache": cache}
            kernels.append(
                {"reads": [made[-1]], "writes": [cache], "writer": "compute" if computed else "copy"}
            )
        if summed:
            state["copies"] = graph.buffer("state", 2000)
            kernels.append({"reads": [state["cache"]], "writes": [state["copies"]], "writer": "copy"})
        out = graph.buffer("output", 8)
        kernels.append({"reads": [made[-1], *state.values()], "writes": [out]})
        graph.program(
            kernels,
            phase="decode" if number == programs - 1 else "prefill",
            inputs={"tokens": tokens},
            outputs={"next": (out, draw(st.sampled_from(["tokens", None])))},
            state=state,
        )
    return graph, tuple(draw(st.integers(1, 5)) for _ in range(programs))


@st.composite
def cases(draw: st.DrawFn, devices: int = 2) -> tuple[Graph, Origin, tuple[int, ...]]:
    graph, rates = draw(graphs(4 - devices))
    signatures = sorted({k.signature for p in graph.programs for k in p.kernels})
    us = {(s, kind): float(draw(st.integers(1, 30))) for s in signatures for kind in ("fast", "slow")}
    total = sum(b.bytes for b in graph.buffers)
    cluster = cluster_of(
        ["fast", "slow", "slow"][:devices],
        [draw(st.sampled_from([total * MANY, total // 2, total // 4])), total * MANY, total][:devices],
        send_us=draw(st.sampled_from([0.0, 1.5])),
        receive_us=draw(st.sampled_from([0.0, 0.5])),
        occupies_sender=draw(st.booleans()),
    )
    return graph, origin_of(graph, times_of(graph.trace(), {"fast": 1.0, "slow": 1.0}, us=us), cluster), rates


def problem_of(origin: Origin, rates: tuple[int, ...], slots: int) -> Problem:
    return build_problem(
        trace=origin.trace,
        needs=[program_needs(origin.trace, origin.deps, p) for p in origin.trace.programs],
        rates=rates,
        slots=slots,
        cluster=origin.cluster,
        devices=origin.cluster.devices,
        times=origin.times,
        condition="beside",
    )


def everything(origin: Origin, rates: tuple[int, ...], slots: int) -> Iterator[Evaluation]:
    """The evaluation of every sound plan that fits into memory."""
    names = [device.name for device in origin.cluster.devices]
    subsets = [s for n in range(1, len(names) + 1) for s in combinations(names, n)]
    programs = origin.trace.programs
    keys = [(p, k.id) for p, program in enumerate(programs) for k in program.kernels]
    choices = [
        subsets if programs[p].kernels[k].state_writer == "copy" else [(name,) for name in names]
        for p, k in keys
    ]
    for spots in product(*choices):
        plan = plan_of(origin, programs, rates, slots, dict(zip(keys, spots, strict=True)))
        if not structure_defects(plan, origin.trace, origin.deps):
            real = evaluate(plan, origin.trace, origin.deps)
            if fits(real, origin.cluster):
                yield real


def fits(real: Evaluation, cluster: Cluster) -> bool:
    return all(held.total <= cluster.device(held.device).capacity_bytes for held in real.memory)


def serial_us(real: Evaluation, rates: tuple[int, ...]) -> float:
    return sum(rate * it.serial_us for rate, it in zip(rates, real.iterations, strict=True))


@settings(max_examples=30, deadline=None)
@given(cases())
def test_throughput_is_optimal_in_memory(case: tuple[Graph, Origin, tuple[int, ...]]) -> None:
    _, origin, rates = case
    problem = problem_of(origin, rates, MANY)
    solution = minimise(problem, "interval", starting_points(problem), EXACT)
    best = min((real.cycles[0].interval_us for real in everything(origin, rates, MANY)), default=None)
    if best is None:
        assert solution.placement is None
    else:
        assert abs(solution.objective_us - best) <= 1e-4 * best
        assert solution.bound_us <= best * (1 + 1e-6)


@settings(max_examples=8, deadline=None)
@given(cases(devices=3))
def test_three_devices(case: tuple[Graph, Origin, tuple[int, ...]]) -> None:
    _, origin, rates = case
    problem = problem_of(origin, rates, 8)
    solution = minimise(problem, "interval", starting_points(problem), EXACT)
    found = [real.iterations[0].resource_us for real in everything(origin, rates, 8)]
    assert solution.cost is not None and found
    assert solution.bound_us <= max(rates[0] * min(found), solution.cost.cycle_path_us) * (1 + 1e-4)
    if solution.cost.cycle_path_us / 8 < solution.cost.cycle_resource_us:
        assert solution.cost.resource_us[0] <= min(found) * (1 + 1e-4)


@settings(max_examples=20, deadline=None)
@given(cases(), st.integers(1, 4))
def test_bounds_hold_where_latency_binds(case: tuple[Graph, Origin, tuple[int, ...]], slots: int) -> None:
    _, origin, rates = case
    problem = problem_of(origin, rates, slots)
    found = [real.cycles[0].interval_us for real in everything(origin, rates, slots)]
    solution = minimise(problem, "interval", starting_points(problem), EXACT)
    if found:
        assert solution.bound_us <= min(found) * (1 + 1e-6)
        assert relaxed_bound_us(problem, "interval") <= min(found) * (1 + 1e-6)


@settings(max_examples=15, deadline=None)
@given(cases())
def test_serial_latency_is_optimal(case: tuple[Graph, Origin, tuple[int, ...]]) -> None:
    _, origin, rates = case
    problem = problem_of(origin, rates, 1)
    solution = minimise(problem, "latency", starting_points(problem), EXACT)
    best = min((serial_us(real, rates) for real in everything(origin, rates, 1)), default=None)
    if best is None:
        assert solution.placement is None
    else:
        assert abs(solution.objective_us - best) <= 1e-4 * best
        assert solution.bound_us <= best * (1 + 1e-6)


@settings(max_examples=30, deadline=None)
@given(cases(), st.integers(1, 5), st.randoms(use_true_random=False))
def test_no_simulation_is_faster_than_the_interval(
    case: tuple[Graph, Origin, tuple[int, ...]], slots: int, random: Random
) -> None:
    _, origin, rates = case
    problem = problem_of(origin, rates, slots)
    count = len(origin.cluster.devices)
    placement = trimmed(problem, settled(problem, [random.randrange(count) for _ in problem.units]))
    route = RouteChoice(problem=problem, placement=placement)
    plan = predicted(origin, [route], strategy="placement", condition="beside", bound_us=None)
    assert structure_defects(plan, origin.trace, origin.deps) == []
    for row in plan.facts["prediction"]["intervals"]:
        assert row["interval_us"] <= row["simulated_us"] * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(cases(), st.integers(1, 4), st.sampled_from([0.0, 0.5, 1.0]), st.randoms(use_true_random=False))
def test_no_batches_leave_faster_than_the_cycle(
    case: tuple[Graph, Origin, tuple[int, ...]], slots: int, apart: float, random: Random
) -> None:
    """However batches arrive: what every resource does for a batch, and what a slot takes for one, is a bound."""
    _, origin, rates = case
    assume(len(rates) > 1)
    problem = problem_of(origin, rates, slots)
    placement = trimmed(problem, settled(problem, [random.randrange(2) for _ in problem.units]))
    route = RouteChoice(problem=problem, placement=placement)
    plan = predicted(origin, [route], strategy="placement", condition="beside", bound_us=None)
    (stated,) = plan.facts["prediction"]["cycles"]
    count = 3 * slots
    batches = [
        BatchPlan(batch=b, route=0, arrival_us=b * apart * stated["interval_us"], iterations=rates)
        for b in range(count)
    ]
    end = max(item.end_us for item in completions(simulate(plan_routes(plan, origin.trace), batches)))
    assert end >= count * stated["resource_us"] * (1 - 1e-9)
    assert end >= count / slots * stated["latency_us"] * (1 - 1e-9)
    assert stated["interval_us"] <= stated["simulated_us"] * (1 + 1e-9)


class Forgetful:
    """A solver that reports its optimum but returns the start that it was given, until it is cleared."""

    def __init__(self, solver: Any) -> None:
        self._solver, self._start = solver, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._solver, name)

    def setSolution(self, count: int, indices: Any, values: Any) -> None:  # noqa: N802 - the solver's own name
        self._start = values

    def clearSolver(self) -> None:  # noqa: N802
        self._start = None
        self._solver.clearSolver()

    def getSolution(self) -> Any:  # noqa: N802
        found = self._solver.getSolution()
        if self._start is None:
            return found
        return SimpleNamespace(col_value=[*self._start, *found.col_value[len(self._start) :][:-1], 99.0])


def test_an_optimum_that_the_solver_mislays_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph()
    last = graph.buffer("input", 8)
    kernels: list[dict[str, Any]] = []
    for number in range(6):
        kernels.append(
            {"reads": [last], "writes": [last := graph.buffer("activation", 8)], "signature": f"k{number}"}
        )
    graph.program(kernels)
    us = {
        (f"k{n}", kind): 90.0 if (n < 3) == (kind == "slow") else 10.0
        for n in range(6)
        for kind in ("fast", "slow")
    }
    times = times_of(graph.trace(), {"fast": 1.0, "slow": 1.0}, us=us)
    problem = problem_of(origin_of(graph, times, cluster_of(["fast", "slow"])), (1,), 1)
    start = [single(problem, 0)]
    expected = minimise(problem, "latency", start, EXACT)
    quiet = solver._quiet
    monkeypatch.setattr(solver, "_quiet", lambda make: Forgetful(quiet(make)))
    found = minimise(problem, "latency", start, EXACT)
    assert found.placement == expected.placement != start[0]


@settings(max_examples=10, deadline=None)
@given(cases())
def test_auto_is_never_worse_than_a_baseline(case: tuple[Graph, Origin, tuple[int, ...]]) -> None:
    _, origin, _ = case
    made, _ = compare(Setting(origin=origin, in_flight=None, output_tokens=4), "auto")
    baselines = [row["tokens_per_s"] for row in made.facts["compared"] if row["strategy"] != "placement"]
    assert made.facts["prediction"]["tokens_per_s"] >= max(baselines) * (1 - 1e-9)
    for row in made.facts["compared"]:
        assert row["feasible"] == (row["tokens_per_s"] > 0)
    if made.facts["strategy"] == "placement":
        assert made.facts["prediction"]["probability_best"] > 0.9 or not any(baselines)
