"""Why a model does not fit, in one line: what is short, by how much and where, and the smallest change that
helps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tessera_core.plan.cluster import GIGABYTE
from tessera_core.plan.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class _Need:
    """Bytes that all kernels together ask for on one device."""

    weights: int
    state: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.state + self.activations

    def text(self) -> str:
        return (
            f"weights {_gb(self.weights)} + state {_gb(self.state)} + activations {_gb(self.activations)}"
            f" = {_gb(self.total)}"
        )


def single_shortage(problems: Sequence[Problem]) -> str:
    """Why none of several one-device problems fits: the nearest miss, and what would mend it."""
    misses = [(_need(problem), problem) for problem in problems]
    need, problem = min(misses, key=lambda miss: miss[0].total - miss[1].domains[0][0])
    device, capacity = problem.devices[0], problem.domains[0][0]
    return (
        f"{need.text()} do not fit {device.name} ({_gb(capacity)} usable): {_gb(need.total - capacity)} short;"
        f" {_remedy(need, capacity, problem, placement=True)}"
    )


def placement_shortage(problem: Problem) -> str:
    """Why no placement over all devices of ``problem`` fits."""
    need = _need(problem)
    capacity = sum(size for size, _ in problem.domains)
    names = ", ".join(device.name for device in problem.devices)
    if need.total > capacity:
        return (
            f"{need.text()} do not fit {names} together ({_gb(capacity)} usable):"
            f" {_gb(need.total - capacity)} short; {_remedy(need, capacity, problem, placement=False)}"
        )
    piece = max(
        [resident.size for resident in problem.weights]
        + [family.size * problem.slots for family in problem.families]
        + [resident.size * problem.slots for resident in problem.activations],
        default=0,
    )
    return (
        f"{need.text()} would fit {names} together ({_gb(capacity)} usable), but no placement found keeps every"
        f" device within its memory, with copies of state and received buffers (largest piece {_gb(piece)});"
        f" give {problem.devices[0].name} more memory or trace a smaller batch"
    )


def _need(problem: Problem) -> _Need:
    return _Need(
        weights=sum(resident.size for resident in problem.weights),
        state=problem.slots * sum(family.size for family in problem.families),
        activations=problem.slots * sum(resident.size for resident in problem.activations),
    )


def _remedy(need: _Need, capacity: int, problem: Problem, *, placement: bool) -> str:
    """The smallest change: fewer requests at once where that suffices, more memory otherwise."""
    room = capacity - need.weights
    per_slot = (need.state + need.activations) / problem.slots
    batch = problem.programs[-1].batch
    spread = " use --strategy placement over several devices, or" if placement else ""
    if room > per_slot and problem.slots > 1:
        return f"use --in-flight {int(room // per_slot)}"
    if room > 0 and (fitting := int(batch * room / max(per_slot, 1))) >= 1:
        return (
            f"trace with batch {fitting} or less,{spread or ' or'} add {_gb(need.total - capacity)} of memory"
        )
    missing = _gb(need.total - capacity)
    cause = "the weights alone are too large" if room <= 0 else "one request alone is too large"
    return f"{cause}:{spread} add {missing} of memory or another device"


def _gb(size: int | float) -> str:
    return f"{size / GIGABYTE:.1f} GB" if size >= 5e7 else f"{size / 1e6:.3g} MB"
