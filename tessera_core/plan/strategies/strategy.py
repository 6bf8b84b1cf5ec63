"""What a strategy is: a name, and a way from a setting to its best plan or to the reason why it has none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from tessera_core.plan.ir import Plan
from tessera_core.plan.predict import RouteChoice
from tessera_core.plan.setting import Choice, Setting
from tessera_core.profile.times import Condition

SLOT_CHOICES = (8, 4, 2, 1)
"""Numbers of batches in flight that are tried where none is fixed; on more than four devices also two and one for
each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A strategy's best plan, or None and the reason."""

    strategy: str
    plan: Plan | None
    routes: tuple[RouteChoice, ...] = ()
    condition: Condition = "alone"
    reason: str = ""


class Strategy(ABC):
    """A way to use the devices, at its own best programs and number of slots.

    ``baseline``: one of the ways that the others have to beat.
    """

    name: ClassVar[str]
    baseline: ClassVar[bool] = True

    @abstractmethod
    def best(self, setting: Setting) -> Candidate:
        """Its best plan, or why there is none."""

    def none(self, reason: str) -> Candidate:
        """No plan, for a reason."""
        return Candidate(strategy=self.name, plan=None, reason=reason)


def smallest(setting: Setting) -> Choice:
    """The choice that asks for the least memory, nearly: the smallest batch."""
    return min(setting.choices, key=lambda choice: (choice.batch, choice.needs[0].program.batch))


def slot_choices(setting: Setting) -> tuple[int, ...]:
    """Numbers of batches in flight that are tried, the most first."""
    if setting.in_flight is not None:
        return (setting.in_flight,)
    if setting.goal == "latency":
        return (1,)
    devices = len(setting.origin.cluster.devices)
    return tuple(sorted({*SLOT_CHOICES, *((2 * devices, devices) if devices > 4 else ())}, reverse=True))


def plan_merit(setting: Setting, plan: Plan) -> float:
    """Larger is better under the policy: tokens a second, or for latency one over a batch's serial time."""
    if setting.goal == "latency":
        return 1 / max(float(plan.facts["prediction"]["objective_us"]), 1e-9)
    return float(plan.facts["prediction"]["tokens_per_s"])
