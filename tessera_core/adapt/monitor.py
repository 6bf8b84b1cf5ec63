"""What is seen of the load: consecutive windows, and the pressure on a plan within each.

Pressure is the work offered in a window over the window's length: the work, on that plan, of the requests that
arrived in it and of those that were already waiting when it began. 1 means that the plan can just keep up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tessera_core.adapt.arrivals import Arrival
from tessera_core.adapt.model import PlanModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One monitoring window ``[start_us, end_us)`` under the plan in force (its index)."""

    index: int
    start_us: float
    end_us: float
    plan: int
    offered: tuple[Arrival, ...]
    arrivals: int
    completions: int
    queued: int
    running: int
    mean_latency_us: float | None

    def pressure(self, plan: PlanModel) -> float:
        """Offered load over the capacity of ``plan``."""
        return pressure(self.offered, plan, self.end_us - self.start_us)


def pressure(offered: Sequence[Arrival], plan: PlanModel, length_us: float) -> float:
    """Work of ``offered`` on ``plan`` (µs of a full pipeline) over ``length_us``."""
    return sum(plan.work_us(arrival.output_tokens) for arrival in offered) / length_us
