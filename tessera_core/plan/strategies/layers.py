"""The layers cut into bands, one for each device: pipeline parallelism."""

from __future__ import annotations

from tessera_core.plan.placement import Placement, bands
from tessera_core.plan.problem import Problem
from tessera_core.plan.setting import Setting
from tessera_core.plan.strategies.placed import Shared


class Pipeline(Shared):
    """A band of layers on each device, all programs cut alike."""

    name = "pipeline"
    what = "cut into bands of layers"

    def refusal(self, setting: Setting) -> str:
        """It always can."""
        return ""

    def placements(self, setting: Setting, problem: Problem) -> list[Placement]:
        """Balanced bands, and those that moving cuts leads to."""
        return bands(problem)
