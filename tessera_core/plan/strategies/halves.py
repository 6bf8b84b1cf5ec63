"""Some kernels on one half of the devices and the rest on the other: prefill apart from decode, attention apart from
everything else.

State lives on both halves where both need it. Whatever only copies into it (an append to a KV cache) runs on every
home from shipped inputs, and this is how a prompt's keys and values reach the devices that decode.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from tessera_core.plan.blend import program_order
from tessera_core.plan.loads import load_model
from tessera_core.plan.placement import Placement, settled
from tessera_core.plan.problem import Problem
from tessera_core.plan.setting import Setting
from tessera_core.plan.strategies.placed import Shared, split_groups
from tessera_core.plan.types import Types, spread


class Halves(Shared):
    """Units of one kind on one group of devices, the others on another, for each way to part the devices."""

    @abstractmethod
    def first(self, setting: Setting, problem: Problem) -> list[bool]:
        """Of each unit, whether it goes to the first group."""

    def starting_points(self, setting: Setting, problem: Problem) -> list[Placement]:
        """Its placements on more than two devices, none where it cannot be: what the solvers don't start from."""
        few = len(problem.devices) <= 2
        return [] if few or self.refusal(setting) else self.placements(setting, problem)

    def placements(self, setting: Setting, problem: Problem) -> list[Placement]:
        """Both ways round; within a group of several devices, runs of layers whose ends move while that helps."""
        chosen = [0 if first else 1 for first in self.first(setting, problem)]
        return [
            settled(problem, _spread(problem, chosen, groups))
            for groups in split_groups([device.type for device in problem.devices])
        ]


def _spread(
    problem: Problem, chosen: Sequence[int], groups: tuple[tuple[int, ...], tuple[int, ...]]
) -> list[int]:
    if all(len(group) == 1 for group in groups):
        return [groups[half][0] for half in chosen]
    types = Types(members=groups)
    return [int(d) for d in spread(load_model(problem), types, chosen, program_order(problem))]


class PrefillDecode(Halves):
    """Prompts on some devices, tokens on others."""

    name = "prefill-decode"
    what = "split of prefill and decode"

    def refusal(self, setting: Setting) -> str:
        """Where there are not two phases, or state has one home that both need."""
        needs = setting.choices[0].needs
        if len(needs) == 1:
            return f"the trace holds one phase ({needs[0].program.phase}) alone; trace prefill and decode"
        computed = frozenset().union(*(need.computed for need in needs))
        shared = frozenset.intersection(*(frozenset().union(*need.families.values()) for need in needs))
        if computed & shared:
            return (
                f"state {min(computed & shared)} is computed, not copied into, so it has one home, and what"
                " prefills and what decodes must share a device"
            )
        return ""

    def first(self, setting: Setting, problem: Problem) -> list[bool]:
        """Units of the first program."""
        return [unit.kernels[0][0] == 0 for unit in problem.units]


class AttentionFfn(Halves):
    """Attention with its caches on some devices, everything else on others."""

    name = "attention-ffn"
    what = "split of attention from the rest"

    def refusal(self, setting: Setting) -> str:
        """Where the model has no attention."""
        kinds = {kernel.kind for need in setting.choices[0].needs for kernel in need.program.kernels}
        return "" if "attention" in kinds else "the model has no attention kernel"

    def first(self, setting: Setting, problem: Problem) -> list[bool]:
        """Units with an attention kernel, and those that read the caches."""
        caches = {state.name for state in setting.origin.trace.states if state.sequence_axis is not None}
        reading = {unit for family in problem.families if family.name in caches for unit in family.units}
        return [
            index in reading
            or any(problem.programs[p].kernels[k].kind == "attention" for p, k in unit.kernels)
            for index, unit in enumerate(problem.units)
        ]
