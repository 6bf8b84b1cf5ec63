"""What a batch's iterations wait for each other along: the longest path from what one is fed to what it feeds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tessera_core.plan.needs import ProgramNeeds, feeding
from tessera_core.program.ir import Trace

if TYPE_CHECKING:
    from tessera_core.plan.problem import KernelKey, Unit


def fed_path(
    trace: Trace,
    needs: Sequence[ProgramNeeds],
    position: int,
    unit_of: Mapping[KernelKey, int],
    units: Sequence[Unit],
) -> tuple[int, ...]:
    """Units along the longest path, by mean time, from what an iteration's input feeds to what feeds its successor;
    no unit twice, no replicable one. Empty where iterations don't wait for each other.

    Whatever the placement, a batch's iterations follow each other no faster than this path takes.
    """
    need = needs[position]
    first: set[int] = set()
    last: set[int] = set()
    for p, output, q, target in feeding(trace, needs):
        if p == q == position:
            first |= set(need.readers.get(target, ()))
            last |= set(need.writers.get(output, ())[-1:])
    best: dict[int, float] = {}
    before: dict[int, int] = {}
    sources: dict[int, list[int]] = defaultdict(list)
    for source, destination in need.edges:
        sources[destination].append(source)
    for kernel in need.program.kernels:
        reached = [k for k in sources[kernel.id] if k in best]
        if not reached and kernel.id not in first:
            continue
        unit = units[unit_of[position, kernel.id]]
        counted = len(unit.kernels) == 1 and not unit.replicable
        best[kernel.id] = sum(unit.times[position]) / len(unit.times[position]) if counted else 0.0
        if reached:
            before[kernel.id] = max(reached, key=lambda k: (best[k], -k))
            best[kernel.id] += best[before[kernel.id]]
    path: list[int] = []
    at = max(last & set(best), key=lambda k: (best[k], -k), default=None)
    while at is not None:
        unit = units[unit_of[position, at]]
        if len(unit.kernels) == 1 and not unit.replicable:
            path.append(unit_of[position, at])
        at = before.get(at)
    return tuple(reversed(path))
