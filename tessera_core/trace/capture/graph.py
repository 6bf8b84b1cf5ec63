"""A captured CUDA graph as plain values, and the byte layout of copies and fills."""

from __future__ import annotations

import heapq
import struct
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

MEMCPY = struct.Struct("<9Q")
"""A memcpy's parameter block: destination, source, width in bytes, height, depth, then destination pitch and
height and source pitch and height (in bytes and rows; both 0 where height and depth are 1)."""
MEMSET = struct.Struct("<6Q")
"""A memset's parameter block: destination, value, bytes of an element, width in elements, height, pitch."""

Extents = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RawLaunch:
    """One node that works: a kernel launch, a copy or a fill.

    ``node``: the graph node's handle. ``handle``: the function's, 0 for copies and fills. ``parameters``: the
    whole block as launched. ``layout``: (offset, bytes) of each parameter. ``packed``: the launcher passed the
    block as a whole. ``cooperative``: all blocks must be resident together.
    """

    node: int
    kind: Literal["kernel", "memcpy", "memset"]
    function: str
    handle: int
    grid: Extents
    block: Extents
    cluster: Extents
    shared_bytes: int
    cooperative: bool
    parameters: bytes
    layout: tuple[tuple[int, int], ...]
    packed: bool = False


@dataclass(frozen=True, slots=True)
class RawGraph:
    """Launches in an order that respects ``edges`` (pairs of positions: source, destination)."""

    launches: tuple[RawLaunch, ...]
    edges: tuple[tuple[int, int], ...]


def without_empty(edges: Sequence[tuple[int, int]], empty: Collection[int]) -> set[tuple[int, int]]:
    """Edges between the other nodes, paths through ``empty`` nodes contracted."""
    after: dict[int, set[int]] = defaultdict(set)
    for source, destination in edges:
        after[source].add(destination)
    hollow = set(empty)

    def reached(node: int, seen: set[int]) -> set[int]:
        found: set[int] = set()
        for other in after[node]:
            if other not in hollow:
                found.add(other)
            elif other not in seen:
                seen.add(other)
                found |= reached(other, seen)
        return found

    return {(node, other) for node in list(after) if node not in hollow for other in reached(node, set())}


def topological(count: int, edges: Collection[tuple[int, int]]) -> list[int]:
    """Positions 0 to ``count`` in an order that respects ``edges``, smallest first."""
    waiting = [0] * count
    after: dict[int, list[int]] = defaultdict(list)
    for source, destination in edges:
        waiting[destination] += 1
        after[source].append(destination)
    ready = [node for node in range(count) if not waiting[node]]
    order: list[int] = []
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for other in after[node]:
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, other)
    assert len(order) == count, "a CUDA graph with a cycle"
    return order
