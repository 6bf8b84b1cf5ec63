"""Sampling blocks in rounds: each round times every block once, so that all meet the same clocks and drift.

Many launches of one product in a row would heat the GPU until it slows down; in turn, blocks draw the power that
iterations draw. A block drops out once the interval of its median is narrow.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tessera_core.profile.measure.cpu import median_interval
from tessera_core.profile.measure.cuda_blocks import Block, CoRunner
from tessera_core.profile.measure.cuda_lab import Lab
from tessera_formats.errors import DeviceLostError

NARROW = 0.01
"""Half the interval of a median over the median: narrow enough."""
LEAST_ROUNDS, MOST_ROUNDS = 21, 200
WARM_UP_ROUNDS = 2
LASTING_MARGIN = 1.3
"""A co-runner is given work for so many times what the round is expected to take."""
ATTEMPTS = 8
"""Rounds in a row that a co-runner may end too early; it is given half as much again each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTimes:
    """Microseconds of one launch, one value per block; ``launches`` in each."""

    times_us: npt.NDArray[np.float64]
    launches: int

    @property
    def median_us(self) -> float:
        """Of the blocks."""
        return float(np.median(self.times_us))

    @property
    def interval_us(self) -> tuple[float, float]:
        """90% interval of the median."""
        return median_interval(self.times_us)

    @property
    def narrow(self) -> bool:
        """Whether the interval is narrow enough to stop."""
        low, high = self.interval_us
        return high - low <= 2 * NARROW * self.median_us


def sample(
    lab: Lab, blocks: Sequence[Block], seconds: float, beside: CoRunner | None = None
) -> Mapping[str, BlockTimes]:
    """Times of all blocks by name, in rounds until each is narrow or ``seconds`` are over.

    Rounds that a co-runner did not fill to their end don't count. Raises :class:`DeviceLostError` where it
    never does.
    """
    found: dict[str, list[float]] = {block.name: [] for block in blocks}
    until = time.perf_counter() + seconds
    open_blocks = list(blocks)
    lasting_us, margin = 0.0, LASTING_MARGIN
    rounds = failures = 0
    while open_blocks and rounds < MOST_ROUNDS + WARM_UP_ROUNDS:
        if rounds >= LEAST_ROUNDS + WARM_UP_ROUNDS and time.perf_counter() >= until:
            break
        times, took_us, filled = _round(lab, open_blocks, beside, lasting_us)
        if not filled and lasting_us:
            margin *= 1.5
        lasting_us = took_us * margin
        if not filled:
            failures += 1
            if failures == ATTEMPTS:
                raise DeviceLostError(
                    "the co-runner's iterations end before what they run beside; run tessera profile again"
                )
            continue
        failures = 0
        rounds += 1
        if rounds <= WARM_UP_ROUNDS:
            continue
        for block, value in zip(open_blocks, times):
            found[block.name].append(max(0.0, value - lab.fixed_us) / block.launches)
        if rounds >= LEAST_ROUNDS + WARM_UP_ROUNDS:
            open_blocks = [block for block in open_blocks if not _times(block, found).narrow]
    return {block.name: _times(block, found) for block in blocks}


def _round(
    lab: Lab, blocks: Sequence[Block], beside: CoRunner | None, lasting_us: float
) -> tuple[list[float], float, bool]:
    """Times of the blocks, the time of the whole round, and whether the co-runner filled it."""
    ended = None
    if beside is not None:
        begun, ended = beside.start(lasting_us)
        lab.after(begun)
    lab.space()
    first = lab.mark()
    marks = []
    for block in blocks:
        lab.launch(block.before)
        begin = lab.mark()
        lab.launch(block.body)
        marks.append((begin, lab.mark()))
    last = lab.mark()
    lab.settle()
    filled = beside is None or not beside.lab.passed(ended)
    if beside is not None:
        beside.lab.settle()
    return (
        [lab.microseconds(*pair) for pair in marks],
        lab.microseconds(first, last),
        filled,
    )


def _times(block: Block, found: Mapping[str, list[float]]) -> BlockTimes:
    return BlockTimes(times_us=np.array(found[block.name], dtype=np.float64), launches=block.launches)
