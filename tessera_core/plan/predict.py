"""What a chosen way of using the devices comes to: the plan with every figure that it states.

Intervals come twice: by formula (the busiest resource, or latency over slots) for the objective and its
bound, and by the simulator that follows the workers' own rule of dispatch; throughput and time per token are
the simulator's, from whole batches of requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tessera_core.deps.graph import Deps
from tessera_core.execute.cycle import Pace, simulated_rates, steady_pace
from tessera_core.execute.segments import RouteModel, plan_routes
from tessera_core.execute.simulator import steady_interval
from tessera_core.plan.assemble import assignments, home_rows, transfers
from tessera_core.plan.cluster import Cluster
from tessera_core.plan.figures import Cycle, Evaluation, cycle_of, evaluate, objective_us, speed
from tessera_core.plan.ir import Assignment, Plan, PlanDevice, Route
from tessera_core.plan.placement import Placement, cost
from tessera_core.plan.problem import Problem
from tessera_core.profile.times import Condition, Times
from tessera_core.program.ir import Trace
from tessera_formats.profile import SOURCES


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteChoice:
    """A route before it has a number: a problem and where its units go."""

    problem: Problem
    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a plan is made from, and for: inputs, their digests, and the policy."""

    trace: Trace
    deps: Deps
    times: Times
    cluster: Cluster
    policy: str
    digests: Mapping[str, str]
    targets: tuple[str, ...]


def predicted(
    origin: Origin,
    routes: Sequence[RouteChoice],
    *,
    strategy: str,
    condition: Condition,
    bound_us: float | None,
) -> Plan:
    """The plan of ``routes`` with all figures but the comparison with other strategies.

    ``bound_us``: no plan of this strategy has a lower objective in the cost model; None: this is the only one.
    """
    plan = _unweighed(origin, routes, strategy, condition)
    real = evaluate(plan, origin.trace, origin.deps)
    _cross_check(routes, real)
    models = plan_routes(plan, origin.trace)
    simulated = {
        (model.route, program.name): steady_interval(model, program.name)
        for model in models
        for program in model.programs
    }
    paces = _paces(plan, origin.trace, models, real.cycles)
    pace = speed(plan.routes, paces)
    total = sum(pace.requests_per_s)
    plan = replace(
        plan,
        routes=tuple(
            replace(route, share=requests / total)
            for route, requests in zip(plan.routes, pace.requests_per_s, strict=True)
        ),
    )
    objective = objective_us(plan, real)
    capacities = {device.name: device.capacity_bytes for device in origin.cluster.devices}
    prediction: dict[str, Any] = {
        "objective_us": objective,
        "lower_bound_us": 0.0,
        "gap": 0.0,
        "tokens_per_s": pace.tokens_per_s,
        "time_per_token_us": pace.time_per_token_us,
        **time_shares(origin, plan, condition),
        "probability_best": 0.0,
        "intervals": [
            {
                "route": it.route,
                "program": it.program,
                "resource_us": it.resource_us,
                "latency_us": it.latency_us,
                "interval_us": it.interval_us,
                "simulated_us": simulated[it.route, it.program],
            }
            for it in real.iterations
        ],
        "cycles": [
            {
                "route": item.route,
                "resource_us": item.resource_us,
                "latency_us": item.latency_us,
                "interval_us": item.interval_us,
                "simulated_us": paces[item.route].cycle_us,
                "token_us": paces[item.route].token_us,
            }
            for item in real.cycles
        ],
    }
    memory = [
        {
            "device": held.device,
            "weight_bytes": held.weight_bytes,
            "state_bytes": held.state_bytes,
            "activation_bytes": held.activation_bytes,
            "capacity_bytes": capacities[held.device],
        }
        for held in real.memory
    ]
    plan = replace(plan, facts={**plan.facts, "prediction": prediction, "memory": memory})
    return bounded(plan, objective if bound_us is None else bound_us)


def bounded(plan: Plan, bound_us: float) -> Plan:
    """The plan, stating that no plan of its strategy has a lower objective than ``bound_us`` (0: nothing known)."""
    prediction = plan.facts["prediction"]
    objective = prediction["objective_us"]
    bound = min(bound_us, objective)
    stated = {"lower_bound_us": bound, "gap": objective / bound - 1 if bound > 0 else 0.0}
    return replace(plan, facts={**plan.facts, "prediction": {**prediction, **stated}})


def simulated_tokens_per_s(origin: Origin, routes: Sequence[RouteChoice], condition: Condition) -> float:
    """Tokens a second of ``routes`` in simulation: what :func:`predicted` states, and nothing else of it."""
    plan = _unweighed(origin, routes, "placement", condition)
    models = plan_routes(plan, origin.trace)
    cycles = [
        cycle_of(plan, route, origin.trace, model) for route, model in zip(plan.routes, models, strict=True)
    ]
    return speed(plan.routes, _paces(plan, origin.trace, models, cycles)).tokens_per_s


def _unweighed(origin: Origin, routes: Sequence[RouteChoice], strategy: str, condition: Condition) -> Plan:
    """The plan of ``routes`` without predictions."""
    times, cluster = origin.times, origin.cluster

    def kernel_us(signature: str, device_type: str) -> float:
        return times.time(signature, device_type, condition).median_us

    return Plan(
        devices=tuple(
            PlanDevice(
                name=d.name, type=d.type, capacity_bytes=d.capacity_bytes, memory_domain=d.memory_domain
            )
            for d in cluster.devices
        ),
        routes=tuple(
            Route(
                route=number,
                share=1.0,
                batch=choice.problem.programs[-1].batch,
                slots=choice.problem.slots,
                programs=tuple(program.name for program in choice.problem.programs),
                rates=choice.problem.rates,
            )
            for number, choice in enumerate(routes)
        ),
        assignments=tuple(
            row
            for number, choice in enumerate(routes)
            for row in assignments(choice.problem, choice.placement, number, kernel_us)
        ),
        transfers=tuple(
            row
            for number, choice in enumerate(routes)
            for row in transfers(choice.problem, choice.placement, number)
        ),
        homes=tuple(
            row
            for number, choice in enumerate(routes)
            for row in home_rows(choice.problem, choice.placement, number)
        ),
        facts={
            **origin.digests,
            "policy": origin.policy,
            "strategy": strategy,
            "requested": strategy,
            "condition": _condition_used(origin, routes, condition),
            "targets": list(origin.targets),
            "link": _links(cluster),
            "overhead": [
                {"device": d.name, "overhead_us": times.overhead_us(d.type)} for d in cluster.devices
            ],
            "compared": [],
        },
    )


def _paces(
    plan: Plan, trace: Trace, models: Sequence[RouteModel], cycles: Sequence[Cycle]
) -> dict[int, Pace]:
    """By route: its pace in simulation.

    Where a batch is too long to be simulated, its rates are brought down together, and what dispatch loses then
    against the bound of those rates is taken to be lost at the full ones. A measured window may begin with more work
    done ahead than it ends with, so no pace is taken to be below its bound.
    """
    paces = {}
    for item, model, route in zip(cycles, models, plan.routes, strict=True):
        rates = simulated_rates(model, route.rates)
        bound = item.interval_us
        if rates != route.rates:
            bound = cycle_of(plan, replace(route, rates=rates), trace, model).interval_us
        found = steady_pace(model, rates, bound)
        lost = max(found.cycle_us / max(bound, 1e-9), 1.0)
        paces[item.route] = Pace(cycle_us=item.interval_us * lost, token_us=found.token_us)
    return paces


def time_shares(origin: Origin, plan: Plan, condition: Condition) -> dict[str, float]:
    """Share of kernel time by source, iterations weighted by rate and routes by share."""
    weight = {
        (route.route, name): route.share * rate / route.batch
        for route in plan.routes
        for name, rate in zip(route.programs, route.rates, strict=True)
    }
    types = {device.name: device.type for device in plan.devices}
    sums: dict[str, float] = defaultdict(float)
    for (signature, device), microseconds in _by_signature(origin.trace, plan.assignments, weight).items():
        sums[origin.times.time(signature, types[device], condition).source] += microseconds
    total = sum(sums.values())
    return {f"{source}_share": sums[source] / total if total else 0.0 for source in SOURCES}


def _condition_used(origin: Origin, routes: Sequence[RouteChoice], wanted: Condition) -> Condition:
    """``wanted``, unless the profiles hold none of its times for what these routes run."""
    found = {
        origin.times.time(kernel.signature, device.type, wanted).condition
        for choice in routes
        for program in choice.problem.programs
        for kernel in program.kernels
        for device in choice.problem.devices
    }
    return wanted if wanted in found or not found else next(iter(found))


def _by_signature(
    trace: Trace, rows: Sequence[Assignment], weight: Mapping[tuple[int, str], float]
) -> dict[tuple[str, str], float]:
    sums: dict[tuple[str, str], float] = defaultdict(float)
    kernels = {program.name: program.kernels for program in trace.programs}
    for row in rows:
        key = (kernels[row.program][row.kernel].signature, row.device)
        sums[key] += row.time_us * weight[row.route, row.program]
    return sums


def _links(cluster: Cluster) -> list[dict[str, Any]]:
    return [
        {
            "source": source,
            "destination": destination,
            "latency_us": link.latency_us,
            "gbit_per_s": link.gbit_per_s,
            "send_us": link.send_us,
            "receive_us": link.receive_us,
            "occupies_sender": link.occupies_sender,
        }
        for (source, destination), link in cluster.links.items()
    ]


def _cross_check(routes: Sequence[RouteChoice], real: Evaluation) -> None:
    """The solver's own figures against the checker's: a difference is a mistake of ours."""
    figures = [cost(choice.problem, choice.placement) for choice in routes]
    claimed = [value for item in figures for value in item.resource_us]
    serial = [value for item in figures for value in item.serial_us]
    for iteration, resource_us, serial_us in zip(real.iterations, claimed, serial, strict=True):
        assert abs(iteration.resource_us - resource_us) <= 1e-6 * resource_us, (iteration, resource_us)
        assert abs(iteration.serial_us - serial_us) <= 1e-6 * serial_us, (iteration, serial_us)
    for cycle, item in zip(real.cycles, figures, strict=True):
        assert abs(cycle.resource_us - item.cycle_resource_us) <= 1e-6 * cycle.resource_us, (cycle, item)
    # Routes through one device would share its weights, which a problem counts for itself.
    if len(routes) == 1:
        held = sum(item.total for item in real.memory)
        assert held == sum(figures[0].domain_bytes), (held, figures[0].domain_bytes)
