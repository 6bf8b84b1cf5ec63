"""Formation of kernels: which ops are placed as one unit, and in which order the units can run.

Matrix products, attention, convolutions, sorts, embeddings, raw Triton launches and writers of state are
*anchors*, each a kernel of its own (integer counters of one depth share one). Everything else is *light*.
The depth of an op is the largest number of anchors, and of passages to another stream of the user's, on a path
that leads to it. Depth never falls along a path, and rises at every anchor and passage; so light ops of one
depth that are connected form a group that no path can leave and enter again, and the groups can always be
ordered. That is also how a compiler fuses a run of pointwise and reduction work between two matrix products.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tessera_core.program.boxes import Box, may_overlap

NodeKind = Literal["light", "anchor", "writer", "counter"]


@dataclass(frozen=True, slots=True)
class Touch:
    """An access of an op: ``box`` None is the whole buffer."""

    buffer: int
    box: Box | None
    writes: bool


@dataclass(frozen=True, slots=True)
class Node:
    """An op as formation sees it. ``writer``: an anchor that writes state; ``counter``: integers only."""

    kind: NodeKind
    touches: tuple[Touch, ...]
    stream: int = 0


def predecessors(nodes: Sequence[Node]) -> list[set[int]]:
    """For each op the earlier ops that it must follow (read after write, write after read or write)."""
    written = {touch.buffer for node in nodes for touch in node.touches if touch.writes}
    seen: dict[int, list[tuple[int, Touch]]] = defaultdict(list)
    result: list[set[int]] = []
    for index, node in enumerate(nodes):
        before: set[int] = set()
        for touch in node.touches:
            if touch.buffer in written:
                before |= {
                    other
                    for other, earlier in seen[touch.buffer]
                    if (earlier.writes or touch.writes) and _overlap(earlier.box, touch.box)
                }
        for touch in node.touches:
            if touch.buffer in written:
                if touch.writes and touch.box is None:
                    # Whatever comes later follows this write, which follows all that came before.
                    seen[touch.buffer].clear()
                seen[touch.buffer].append((index, touch))
        before.discard(index)
        result.append(before)
    return result


def form_kernels(nodes: Sequence[Node]) -> list[tuple[int, ...]]:
    """Groups of op indices, each ascending, in an order in which they can be executed one by one."""
    before = predecessors(nodes)
    after: list[list[int]] = [[] for _ in nodes]
    for index, earlier in enumerate(before):
        for other in earlier:
            after[other].append(index)
    depth = [0] * len(nodes)
    for index, earlier in enumerate(before):
        stream = nodes[index].stream
        depth[index] = max(
            (depth[o] + (nodes[o].kind != "light" or nodes[o].stream != stream) for o in earlier), default=0
        )
    parent = list(range(len(nodes)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    def join(first: int, second: int) -> None:
        low, high = sorted((root(first), root(second)))
        parent[high] = low

    # An op that reads nothing (an allocation, a fill, a range) may run as late as its first user. One with users on
    # another stream stays alone: that much later, it could close a cycle.
    sources = {
        index
        for index, node in enumerate(nodes)
        if node.kind == "light" and not before[index] and all(touch.writes for touch in node.touches)
    }
    alone = {index for index in sources if any(nodes[o].stream != nodes[index].stream for o in after[index])}
    for index in sources:
        depth[index] = min((depth[o] for o in after[index]), default=0)
    counters: dict[tuple[int, int], int] = {}
    for index, node in enumerate(nodes):
        if node.kind == "counter":
            join(index, counters.setdefault((depth[index], node.stream), index))
        if node.kind != "light" or index in alone:
            continue
        users = [o for o in after[index] if depth[o] == depth[index]]
        light = [o for o in users if nodes[o].kind == "light"]
        for other in light:
            join(index, other)
        if not light and index in sources and users and nodes[users[0]].kind == "anchor":
            join(index, users[0])
    return _ordered([root(index) for index in range(len(nodes))], before)


def _ordered(group: Sequence[int], before: Sequence[set[int]]) -> list[tuple[int, ...]]:
    """Groups in topological order, earliest first op first."""
    members: dict[int, list[int]] = defaultdict(list)
    for index, name in enumerate(group):
        members[name].append(index)
    waiting = {name: {group[o] for i in ops for o in before[i]} - {name} for name, ops in members.items()}
    followers: dict[int, list[int]] = defaultdict(list)
    for name, others in waiting.items():
        for other in others:
            followers[other].append(name)
    missing = {name: len(others) for name, others in waiting.items()}
    ready = [(ops[0], name) for name, ops in members.items() if not missing[name]]
    heapq.heapify(ready)
    order: list[tuple[int, ...]] = []
    while ready:
        _, name = heapq.heappop(ready)
        order.append(tuple(members[name]))
        for follower in followers[name]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, (members[follower][0], follower))
    assert len(order) == len(members), "kernel groups form a cycle"
    return order


def _overlap(first: Box | None, second: Box | None) -> bool:
    return first is None or second is None or may_overlap(first, second)
