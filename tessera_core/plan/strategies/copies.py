"""The whole model on one device, and a copy of it on every device that holds one."""

from __future__ import annotations

from collections.abc import Sequence

from tessera_core.plan.cluster import Device
from tessera_core.plan.figures import Held, evaluate
from tessera_core.plan.ir import Plan
from tessera_core.plan.placement import cost, single
from tessera_core.plan.predict import RouteChoice, predicted
from tessera_core.plan.setting import Setting
from tessera_core.plan.shortage import single_shortage
from tessera_core.plan.strategies.strategy import Candidate, Strategy, smallest
from tessera_core.profile.times import Condition


class Single(Strategy):
    """The best device alone, at its best batch."""

    name = "single"

    def best(self, setting: Setting) -> Candidate:
        """Its best plan, or why there is none."""
        slots, devices = setting.in_flight or 1, setting.origin.cluster.devices
        found = [alone for device in devices if (alone := _alone(setting, device, slots)) is not None]
        if not found:
            problems = [setting.problem(smallest(setting), [device], slots, "alone") for device in devices]
            return self.none(single_shortage(problems))
        _, route = max(found, key=lambda alone: alone[0])
        plan = predicted(setting.origin, [route], strategy=self.name, condition="alone", bound_us=None)
        return Candidate(strategy=self.name, plan=plan, routes=(route,), reason=route.problem.devices[0].name)


class DataParallel(Strategy):
    """A copy on every device that holds one, requests shared out by speed."""

    name = "data-parallel"

    def best(self, setting: Setting) -> Candidate:
        """Its best plan, or why there is none."""
        cluster = setting.origin.cluster
        condition = setting.condition(len(cluster.devices), copies=True)
        if len(cluster.devices) < 2:
            return self.none("the cluster has one device")
        first = {device.name: _alone(setting, device, 1, condition) for device in cluster.devices}
        fitting = [device for device in cluster.devices if first[device.name] is not None]
        left_out = [device for device in cluster.devices if first[device.name] is None]
        if len(fitting) < 2:
            problems = [setting.problem(smallest(setting), [device], 1, "alone") for device in left_out]
            return self.none(single_shortage(problems))
        slots = [1 for _ in fitting]
        if setting.in_flight is not None:
            merits = [found[0] for device in fitting if (found := first[device.name]) is not None]
            if setting.in_flight < len(fitting):
                return self.none(f"{len(fitting)} copies need at least {len(fitting)} batches in flight")
            slots = _apportioned(setting.in_flight, merits)
        routes: list[RouteChoice] = []
        for device, count in zip(fitting, slots, strict=True):
            found = _alone(setting, device, count, condition)
            if found is None:
                problem = setting.problem(smallest(setting), [device], count, condition)
                return self.none(single_shortage([problem]))
            routes.append(found[1])
        plan = predicted(setting.origin, routes, strategy=self.name, condition=condition, bound_us=None)
        over = _over_domains(setting, plan)
        if over:
            return self.none(over)
        without = f" (no copy fits {', '.join(device.name for device in left_out)})" if left_out else ""
        return Candidate(
            strategy=self.name,
            plan=plan,
            routes=tuple(routes),
            condition=condition,
            reason=f"a copy on each of {len(routes)} devices{without}",
        )


def _alone(
    setting: Setting, device: Device, slots: int, condition: Condition = "alone"
) -> tuple[float, RouteChoice] | None:
    """The best choice of programs on one device, with its merit; None where none fits."""
    best: tuple[float, RouteChoice] | None = None
    for choice in setting.choices:
        problem = setting.problem(choice, [device], slots, condition)
        everything = single(problem, 0)
        figures = cost(problem, everything)
        merit = setting.merit(problem, figures)
        if figures.excess_bytes == 0 and (best is None or merit > best[0]):
            best = (merit, RouteChoice(problem=problem, placement=everything))
    return best


def _apportioned(total: int, weights: Sequence[float]) -> list[int]:
    """``total`` in whole parts of at least one, as near to ``weights`` as that allows."""
    parts = [1 for _ in weights]
    for _ in range(total - len(weights)):
        parts[max(range(len(weights)), key=lambda i: (weights[i] / (parts[i] + 1), -i))] += 1
    return parts


def _over_domains(setting: Setting, plan: Plan) -> str:
    """Which shared memory the routes overfill together, or nothing."""
    held: dict[str, Held] = {
        row.device: row for row in evaluate(plan, setting.origin.trace, setting.origin.deps).memory
    }
    for domain, size in setting.origin.cluster.domains.items():
        members = [d.name for d in setting.origin.cluster.devices if d.memory_domain == domain]
        need = sum(held[name].total for name in members)
        if need > size:
            return (
                f"the copies on {', '.join(members)} need {need / 1e9:.1f} GB of the {size / 1e9:.1f} GB of"
                f" {domain} that they share: {(need - size) / 1e9:.1f} GB short"
            )
    return ""
