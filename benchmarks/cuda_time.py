"""Time by a CUDA device's own clock: work is captured once, and the graph is replayed between two events."""

from __future__ import annotations

from collections.abc import Callable

import torch


def graph_of(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The work of ``run`` as a graph, after running it once to warm it up."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def replays_us(graph: torch.cuda.CUDAGraph, rounds: int) -> list[float]:
    """Microseconds of each of ``rounds`` replays."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(rounds):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3)
    return found
