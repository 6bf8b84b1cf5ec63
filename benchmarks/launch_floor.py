"""What a CUDA device takes for the least kernel and for one graph launch: the catalogue's launch floors.

A CUDA graph of many dependent launches on tiny operands is replayed; its time over the number of launches is the
floor of a kernel of that kind. The host's time for one graph launch is what a segment costs beside its kernels.
The catalogue (``tessera_core/profile/catalogue.toml``, source ``h200-graphs``) states these figures; the bars
hold where they are met within a quarter.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime

import torch

from benchmarks import Bar, report
from benchmarks.cuda_time import graph_of, replays_us
from tessera_core.profile.catalogue import device_type
from tessera_core.trace.capture.stage import machine_facts

LAUNCHES = 1000
ROUNDS = 50
NEAR = 0.25
"""Relative difference within which two runs of one machine are taken to agree."""


def repeated(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """``LAUNCHES`` calls of ``step`` in one graph, in order on one stream."""

    def run() -> None:
        for _ in range(LAUNCHES):
            step()

    return graph_of(run)


def launch_us(graph: torch.cuda.CUDAGraph) -> list[float]:
    """Microseconds of host time for one replay of an idle device."""
    found = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        found.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return found


def main() -> int:
    """Measure, print, compare with the catalogue."""
    if not torch.cuda.is_available():
        print("benchmarks.launch_floor: needs a CUDA device", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    small = torch.rand(64, device="cuda")
    left = torch.rand(16, 64, device="cuda", dtype=torch.bfloat16)
    right = torch.rand(64, 16, device="cuda", dtype=torch.bfloat16)
    product = torch.empty(16, 16, device="cuda", dtype=torch.bfloat16)
    graphs = {
        "pointwise": repeated(lambda: small.add_(1.0)),
        "product": repeated(lambda: torch.mm(left, right, out=product)),
    }
    one = graph_of(lambda: small.add_(1.0))
    one.replay()
    figures = {
        f"{name}_us": statistics.median(replays_us(graph, ROUNDS)) / LAUNCHES
        for name, graph in graphs.items()
    }
    figures["graph_launch_us"] = statistics.median(launch_us(one))
    known = device_type("h200-sxm")
    stated = {
        "pointwise_us": known.pointwise_floor_us,
        "product_us": known.other_floor_us,
        "graph_launch_us": known.segment_overhead_us,
    }
    bars = [
        Bar(
            f"{name}: measured over the catalogue's {value:g} us",
            round(figures[name] / value, 3),
            f"{1 - NEAR:g} to {1 + NEAR:g}",
            abs(figures[name] / value - 1) <= NEAR,
        )
        for name, value in stated.items()
    ]
    build = machine_facts("cuda:0", compiled=False)
    results = {"date": datetime.now(UTC).date().isoformat(), "build": build, **figures}
    return report("launch_floor", results, bars, f"{build['device']}, driver {build['driver']}")


if __name__ == "__main__":
    sys.exit(main())
