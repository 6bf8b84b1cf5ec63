"""Which plan new requests enter: a ladder of plans, climbed under pressure and descended when it has passed.

The rule (docs/adapt.md states it too). Plans form a ladder: the plan of least latency is its foot, and each next
rung is the plan of least latency among those with more capacity than the rung below. At the end of a window:

- up, if the pressure on the plan in force is above the threshold: to the lowest rung on which the same window's
  pressure is at most the threshold, else to the top;
- down, if on a lower rung the same window's pressure would be below two thirds of the threshold: to the lowest
  such rung.

The band between the two is what keeps the plan from changing with every window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tessera_core.adapt.model import PlanModel
from tessera_core.adapt.monitor import Window

# At the default threshold of 1.5 a lower rung is taken again when it would just keep up (pressure 1).
RETURN_RATIO = 2 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A change of the plan in force at the end of a window; plans by index."""

    window: int
    at_us: float
    before: int
    after: int
    pressure: float
    reason: str


@dataclass(frozen=True, slots=True)
class Controller:
    """The threshold rule over ``ladder``, plan indices from least latency to most capacity."""

    plans: tuple[PlanModel, ...]
    ladder: tuple[int, ...]
    threshold: float

    def decide(self, window: Window) -> Decision | None:
        """The change that a window calls for, if any."""
        now = window.pressure(self.plans[window.plan])
        rung = self.ladder.index(window.plan)
        if now > self.threshold:
            higher = self.ladder[rung + 1 :]
            if not higher:
                return None
            fitting = (p for p in higher if window.pressure(self.plans[p]) <= self.threshold)
            return self._change(
                window, next(fitting, higher[-1]), now, f"pressure {now:.2f} above {self.threshold:g}"
            )
        bound = self.threshold * RETURN_RATIO
        for plan in self.ladder[:rung]:
            there = window.pressure(self.plans[plan])
            if there < bound:
                return self._change(
                    window,
                    plan,
                    now,
                    f"pressure on {self.plans[plan].name} would be {there:.2f}, below {bound:.2g}",
                )
        return None

    def _change(self, window: Window, after: int, pressure: float, reason: str) -> Decision:
        return Decision(
            window=window.index,
            at_us=window.end_us,
            before=window.plan,
            after=after,
            pressure=pressure,
            reason=reason,
        )


def ladder(plans: Sequence[PlanModel], output_tokens: int) -> tuple[int, ...]:
    """Plan indices from least latency to most capacity, for requests of ``output_tokens``.

    A plan that another one beats in both is on no rung; of equal plans the first one is.
    """
    order = sorted(range(len(plans)), key=lambda p: (plans[p].latency_us(output_tokens), p))
    rungs = [order[0]]
    for plan in order[1:]:
        if plans[plan].work_us(output_tokens) < plans[rungs[-1]].work_us(output_tokens):
            rungs.append(plan)
    return tuple(rungs)
