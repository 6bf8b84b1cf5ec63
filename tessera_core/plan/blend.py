"""One placement out of a mix: the layers shared out among the mix's placements in its proportions, then boundaries
and single kernels moved while that helps.

Layers repeat, so a mix in which a third of the batches takes one placement costs, but for the crossings between
them, what one placement costs in which a third of the layers follows it.
"""

from __future__ import annotations

from itertools import permutations

import numpy as np
import numpy.typing as npt

from tessera_core.plan.columns import Mixed
from tessera_core.plan.cut import CutModel, Floats
from tessera_core.plan.placement import Placement, settled, trimmed
from tessera_core.plan.problem import Problem

Devices = npt.NDArray[np.int64]
"""The device of each unit; shape (placements, units). State writers follow whoever reads their state."""

LARGEST_ORDER = 5
"""Placements of a mix that are put in every order; of more, those with the least shares are dropped."""
TRIED = 3
"""Orders whose boundaries are moved."""
PASSES = 8
"""How often boundaries (at one step size) or runs are moved."""
RUNS = (1, 2, 3)
"""Lengths of the runs of units that change sides at the end."""
PAIRED = 400
"""Runs tried two at a time."""
CHECKED = 64
"""Pairs of which the exact cost is taken."""


def blended(model: CutModel, mixed: Mixed, enough_us: float) -> Placement:
    """The best single placement found near a mix; the search ends at ``enough_us``."""
    kept = np.argsort(-mixed.shares, kind="stable")[:LARGEST_ORDER]
    kept = kept[mixed.shares[kept] > 1e-6]
    choices = np.array([[where[0] for where in mixed.placements[i]] for i in kept], dtype=np.int64)
    shares = mixed.shares[kept] / mixed.shares[kept].sum()
    order = program_order(model.problem)
    sequences = [list(sequence) for sequence in permutations(range(len(kept)))]
    ends = [
        np.round(np.cumsum(shares[sequence])[:-1] * len(order)).astype(np.int64) for sequence in sequences
    ]
    banded = np.concatenate(
        [_banded(choices[sequence], order, end[None]) for sequence, end in zip(sequences, ends, strict=True)]
    )
    values = objectives(model, banded)
    best, least = banded[int(np.argmin(values))], float(values.min())
    for index in np.argsort(values, kind="stable")[:TRIED]:
        if least > enough_us and len(kept) > 1:
            devices, value = _moved(model, choices[sequences[index]], order, ends[index], enough_us)
            if value < least:
                best, least = devices, value
    if least > enough_us:
        best = _polished(model, order, best, least, mixed.weights, enough_us)
    return trimmed(model.problem, settled(model.problem, best.tolist()))


def objectives(model: CutModel, devices: Devices) -> Floats:
    """Interval of each placement; what is over in memory makes it larger than any that fits."""
    return _objectives(model, model.loads_of(devices))


def _objectives(model: CutModel, loads: Floats) -> Floats:
    problem, resources = model.problem, model.resources
    total: Floats = loads[:, resources.bounding].max(axis=1)
    for index, (size, _) in enumerate(problem.domains):
        over = np.maximum(loads[:, resources.memory(index)] / max(size, 1) - 1, 0.0)
        total += np.where(over > 0, 1e12 * (1 + over), 0.0)
    return total


def program_order(problem: Problem) -> Devices:
    """Units by layer, then program, then position, so that all programs are cut alike."""
    keys = []
    for unit in problem.units:
        p, k = unit.kernels[0]
        kernels = problem.programs[p].kernels
        layer = kernels[k].layer
        if layer is None:
            known = [i for i in range(len(kernels)) if kernels[i].layer is not None]
            layer = -1 if known and k < known[0] else 1 << 30 if known else 0
        keys.append((layer, p, k))
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)


def _banded(choices: Devices, order: Devices, ends: Devices) -> Devices:
    """Placements in which a run of units follows each of ``choices``; ``ends``: shape (placements, runs - 1)."""
    at = np.empty(len(order), dtype=np.int64)
    at[order] = np.arange(len(order))
    band = (at[None, :, None] >= np.sort(ends, axis=1)[:, None, :]).sum(axis=2)
    banded: Devices = choices[band, np.arange(len(order))[None, :]]
    return banded


def _moved(
    model: CutModel, choices: Devices, order: Devices, ends: Devices, enough_us: float
) -> tuple[Devices, float]:
    """Boundaries moved one at a time, in ever smaller steps, while that helps."""
    devices = _banded(choices, order, ends[None])
    least = float(objectives(model, devices)[0])
    best, step = devices[0], max(1, len(order) // 16)
    while step and least > enough_us:
        for _ in range(PASSES):
            moves = np.repeat(ends[None], 2 * len(ends), axis=0)
            for i in range(len(ends)):
                moves[2 * i, i] += step
                moves[2 * i + 1, i] -= step
            moves = np.clip(moves, 0, len(order))
            devices = _banded(choices, order, moves)
            values = objectives(model, devices)
            index = int(np.argmin(values))
            if values[index] >= least:
                break
            least, ends, best = float(values[index]), moves[index], devices[index]
        step //= 2
    return best, least


def _polished(
    model: CutModel, order: Devices, best: Devices, least: float, weights: Floats, enough_us: float
) -> Devices:
    """Runs of units moved to the other device, two runs at a time, while that helps.

    Two, because what balances the devices is often a kernel one way and another back. Of all runs those are paired
    whose cost at the bound's prices is least; what a pair costs is taken as the sum, then checked.
    """
    for _ in range(PASSES):
        runs = _runs(best, order)
        loads = model.loads_of(np.concatenate([best[None], runs]))
        change = loads[1:] - loads[0]
        near = np.argsort(change @ weights, kind="stable")[:PAIRED]
        both = loads[0] + change[near][:, None] + change[near][None, :]
        both[np.arange(len(near)), np.arange(len(near))] -= change[near]  # a run with itself: the run alone
        values = _objectives(model, both.reshape(-1, loads.shape[1]))
        first = np.argsort(values, kind="stable")[:CHECKED]
        pairs = [(near[i // len(near)], near[i % len(near)]) for i in first]
        tried = np.array([np.where(runs[i] != best, runs[i], runs[j]) for i, j in pairs])
        exact = objectives(model, tried)
        index = int(np.argmin(exact))
        if exact[index] >= least:
            break
        best, least = tried[index], float(exact[index])
        if least <= enough_us:
            break
    return best


def _runs(devices: Devices, order: Devices) -> Devices:
    """Placements in which one run of neighbours has changed sides."""
    found = []
    for length in RUNS:
        for at in range(len(order) - length + 1):
            moved = devices.copy()
            moved[order[at : at + length]] ^= 1
            found.append(moved)
    return np.array(found)
