"""Local search over placements on any number of devices: runs of neighbouring units change devices, what makes the
interval less is kept, and what makes it a little more is kept sometimes, ever less often.

Simulated annealing (Kirkpatrick, Gelatt and Vecchi, Science 220, 1983). The number of steps is fixed and the random
numbers are seeded, so that equal inputs give equal placements.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from tessera_core.plan.moves import Moves
from tessera_core.plan.problem import Problem

COLDEST = 0.0001
"""Temperature at the end, in intervals."""
LONGEST = 8
"""Units that change devices together, at most."""
EVEN = 0.2
POWER = 8
"""Beside the busiest device the others count as well, by this share of a norm of this power: a device that is nearly
as busy is the next to bind."""


def improved(
    problem: Problem,
    start: Sequence[int],
    order: Sequence[int],
    steps: int,
    *,
    hottest: float,
    enough_us: float,
) -> list[int]:
    """A device for each unit: the best placement met in ``steps`` steps from ``start``, or at ``enough_us``.

    ``order``: units in program order, whose neighbours move together. ``hottest``: temperature at the start, in
    intervals: how much worse a step may well be.
    """
    draw = random.Random(0)
    at = Moves(problem, start)
    movable = set(at.movable)
    line = [unit for unit in order if unit in movable]
    place = {unit: index for index, unit in enumerate(line)}
    value = _value(at)
    best, least = list(at.devices), at.objective_us if not at.excess_bytes else math.inf
    scale = value
    for step in range(steps):
        temperature = scale * hottest * (COLDEST / hottest) ** (step / steps)
        moved = _proposal(at, line, place, draw)
        if not moved:
            continue
        units, device = moved
        back = [(unit, at.devices[unit]) for unit in units]
        for unit in units:
            at.move(unit, device)
        changed = _value(at)
        if changed <= value or draw.random() < math.exp((value - changed) / temperature):
            value = changed
            if not at.excess_bytes and (found := at.objective_us) < least * (1 - 1e-9):
                best, least = list(at.devices), found
                if least <= enough_us:
                    break
        else:
            for unit, device in reversed(back):
                at.move(unit, device)
    return best


def _proposal(
    at: Moves, line: Sequence[int], place: dict[int, int], draw: random.Random
) -> tuple[list[int], int] | None:
    """A run of units of one device (a busy one, mostly) and another device: its neighbour's, mostly."""
    count = len(at.problem.devices)
    index = draw.randrange(len(line))
    if draw.random() < 0.7:
        busiest = max(range(count), key=at.loads_us.__getitem__)
        for _ in range(2 * count):
            if at.devices[line[index]] == busiest:
                break
            index = draw.randrange(len(line))
    device = at.devices[line[index]]
    length = min(1 + int(draw.expovariate(0.7)), LONGEST)
    first = last = index
    while last - first + 1 < length and last + 1 < len(line) and at.devices[line[last + 1]] == device:
        last += 1
    neighbours = [
        at.devices[line[i]]
        for i in (first - 1, last + 1)
        if 0 <= i < len(line) and at.devices[line[i]] != device
    ]
    if neighbours and draw.random() < 0.6:
        target = draw.choice(neighbours)
    else:
        target = draw.randrange(count)
    return None if target == device else (list(line[first : last + 1]), target)


def _value(at: Moves) -> float:
    """What the search makes small: the interval, evenness, and memory that is over at a price that no plan pays."""
    busiest = max(at.objective_us, 1e-9)
    norm = float(sum((load / busiest) ** POWER for load in at.loads_us) ** (1 / POWER))
    total = busiest * (1 + EVEN * norm)
    for held, (size, _) in zip(at.memory_bytes, at.problem.domains, strict=True):
        if held > size:
            total *= 1 + 10 * (held - size) / max(size, 1)
    return total
