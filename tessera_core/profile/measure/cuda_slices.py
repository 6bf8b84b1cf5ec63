"""Whether slices of one GPU are disjoint: compute-bound work on one is hardly slowed by the others' being busy.

Slices that overlap slow the smaller one 2.3 to 2.8 times (one H200, 96 beside 36 multiprocessors); disjoint ones share
only power and the memory system, which large products leave alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera_core.profile.measure.cuda_lab import Lab, Replay
from tessera_formats.errors import InputError

OVERLAP_SLOWDOWN = 1.6
"""More than sharing power costs (1.1), less than overlapping does."""
SIZE = 4096
PRODUCTS = 4
BUSY_TIMES = 12
"""Work of the others over that of the slice that is timed: enough for the slowest slice beside the fastest."""


def slowdowns(labs: Sequence[Lab], size: int = SIZE) -> tuple[float, ...]:
    """How many times longer products take on each of ``labs`` while all others multiply too."""
    graphs = [_products(lab, size) for lab in labs]
    for lab, graph in zip(labs, graphs):
        _timed(lab, graph)
    found = []
    for lab, graph in zip(labs, graphs):
        alone = _timed(lab, graph)
        for other, work in zip(labs, graphs):
            if other is not lab:
                other.launch(work)
                begun = other.mark()
                for _ in range(BUSY_TIMES):
                    other.launch(work)
                lab.after(begun)
        found.append(_timed(lab, graph) / alone)
        for other in labs:
            other.settle()
    return tuple(found)


def check_disjoint(labs: Sequence[Lab], name: str, size: int = SIZE) -> tuple[float, ...]:
    """The slowdowns; raises :class:`InputError` where they are those of slices that overlap."""
    found = slowdowns(labs, size)
    if max(found) > OVERLAP_SLOWDOWN:
        raise InputError(
            f"hardware {name}: its slices slow each other {max(found):.1f} times, so they overlap or something else"
            " uses this GPU; wait until it is idle, or measure the whole GPU"
        )
    return found


def _products(lab: Lab, size: int) -> Replay:
    left, right = (torch.randn(size, size, device=lab.device).bfloat16() for _ in range(2))
    result = torch.empty(size, size, dtype=torch.bfloat16, device=lab.device)

    def work() -> None:
        for _ in range(PRODUCTS):
            torch.mm(left, right, out=result)

    lab.run(work)
    lab.settle()
    return lab.record(work)


def _timed(lab: Lab, graph: Replay) -> float:
    begin = lab.mark()
    lab.launch(graph)
    end = lab.mark()
    lab.settle()
    return lab.microseconds(begin, end)
