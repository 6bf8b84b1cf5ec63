"""A plan as the adaptation sees it: its capacity and latency for a request, and its routes to be simulated.

Capacity and latency come from the plan's own predicted intervals: a batch's cycle, shared out over its iterations as
their own intervals are. What happens when batches of two plans share
the devices comes from simulating their segments together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tessera_core.execute.segments import RouteModel, plan_routes
from tessera_core.plan.figures import overlap
from tessera_core.plan.ir import Plan
from tessera_core.program.ir import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCost:
    """A program on a route: requests it serves at once, an iteration's share of a batch's cycle in a full pipeline,
    one iteration alone."""

    name: str
    batch: int
    interval_us: float
    latency_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRoute:
    """A way through the devices. Programs in phase order; the last one is repeated for each further token."""

    batch: int
    programs: tuple[ProgramCost, ...]
    model: RouteModel

    def iterations(self, output_tokens: int) -> tuple[int, ...]:
        """Iterations of each program for a batch whose longest request wants ``output_tokens``.

        Earlier phases fill the batch, a program's batch at a time, and give the first token; they run to the end
        even if the batch isn't full, as they do on the workers.
        """
        earlier = tuple(-(-self.batch // program.batch) for program in self.programs[:-1])
        return (*earlier, output_tokens - 1 if earlier else output_tokens)


@dataclass(frozen=True, slots=True)
class PlanModel:
    """A named plan: its routes."""

    name: str
    routes: tuple[PlanRoute, ...]

    def work_us(self, output_tokens: int) -> float:
        """Time of the full pipeline that one request takes: the inverse of requests a microsecond."""
        rate = 0.0
        for route in self.routes:
            counts = route.iterations(output_tokens)
            time = sum(n * program.interval_us for n, program in zip(counts, route.programs, strict=True))
            rate += route.batch / time
        return 1.0 / rate

    def latency_us(self, output_tokens: int) -> float:
        """From start to end of one request alone, on the route that is fastest for it."""
        return min(
            sum(
                n * p.latency_us for n, p in zip(route.iterations(output_tokens), route.programs, strict=True)
            )
            for route in self.routes
        )


def plan_model(
    name: str, plan: Plan, trace: Trace, corrections: Mapping[tuple[int, str], float]
) -> PlanModel:
    """A plan read for adaptation.

    ``corrections``: measured over planned time by (route, program); all of a program's times are scaled by it.
    Raises :class:`ArtifactError` where plan and trace don't fit.
    """
    intervals = {(row["route"], row["program"]): row for row in plan.facts["prediction"]["intervals"]}
    shares = overlap(plan)
    routes = []
    for route, model in zip(plan.routes, plan_routes(plan, trace), strict=True):
        factors = [corrections.get((route.route, program), 1.0) for program in route.programs]
        rows = [intervals[route.route, program] for program in route.programs]
        routes.append(
            PlanRoute(
                batch=route.batch,
                programs=tuple(
                    ProgramCost(
                        name=program,
                        batch=trace.program(program).batch,
                        interval_us=(row["simulated_us"] or row["interval_us"])
                        * factor
                        * shares[route.route],
                        latency_us=row["latency_us"] * factor,
                    )
                    for program, row, factor in zip(route.programs, rows, factors, strict=True)
                ),
                model=_scaled(model, factors),
            )
        )
    return PlanModel(name, tuple(routes))


def _scaled(model: RouteModel, factors: Sequence[float]) -> RouteModel:
    """The route with all times of each program scaled by its factor."""
    return replace(
        model,
        programs=tuple(
            replace(
                program,
                segments={
                    device: tuple(replace(s, duration_us=s.duration_us * factor) for s in segments)
                    for device, segments in program.segments.items()
                },
            )
            for program, factor in zip(model.programs, factors, strict=True)
        ),
        transfers=tuple(
            replace(
                move,
                sender_us=move.sender_us * factors[move.program],
                link_us=move.link_us * factors[move.program],
                latency_us=move.latency_us * factors[move.program],
            )
            for move in model.transfers
        ),
    )
