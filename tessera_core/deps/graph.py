"""The dependency graph that later stages read: accesses, edges, kernels that share a device, and the order.

A deps artifact holds every target apart. A plan must be safe on whichever build its devices run, so what
:class:`Deps` gives is the union over targets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tessera_core.program.boxes import Box
from tessera_core.program.ir import Evidence, Mode, ValidFor
from tessera_core.program.store import boxes_from_rows
from tessera_formats.bundle import Bundle
from tessera_formats.deps import OPS_TARGET, WHOLE, read_deps

Hazard = Literal["RAW", "WAR", "WAW"]
Precision = Literal["exact", "bounded", "fallback"]

WEAKEST_FIRST: tuple[Evidence, ...] = ("conservative", "observed", "declared", "schema", "ptx")
"""Evidence from a mere assumption to a proof about the binary; an edge carries the weaker of its two ends."""
LOOSEST_FIRST: tuple[Precision, ...] = ("fallback", "bounded", "exact")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What a kernel reads or writes in a buffer. ``boxes`` None: the whole buffer, for want of a bound.

    ``must`` (writes only): every byte of the boxes is certainly written. ``valid_for`` "content": true for the
    traced values alone, so good for cost estimates and nothing else. ``launch``: the kernel's launch that makes it,
    None where only ops are known.
    """

    program: int
    kernel: int
    buffer: int
    mode: Mode
    must: bool
    boxes: tuple[Box, ...] | None
    evidence: Evidence
    precision: Precision
    valid_for: ValidFor = "shapes"
    detail: str = ""
    part: str = WHOLE
    target: str = OPS_TARGET
    launch: int | None = None

    @property
    def needs_content(self) -> bool:
        """Whether what was in the buffer before matters: for every read, and every write that may leave bytes."""
        return self.mode == "read" or not self.must


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """``destination`` waits for ``source`` because of ``buffer``.

    ``boxes``: bytes of the source's access that the destination touches (None: whole buffer). ``must`` (RAW only):
    the source certainly wrote them and nobody else does before the destination, so they may be shipped alone.
    """

    program: int
    source: int
    destination: int
    buffer: int
    hazard: Hazard
    boxes: tuple[Box, ...] | None
    must: bool
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Deps:
    """A deps artifact, as the union over its targets."""

    digest: str
    program_digest: str
    targets: tuple[str, ...]
    accesses_of: Mapping[int, tuple[Access, ...]]
    edges_of: Mapping[int, tuple[Edge, ...]]
    chains_of: Mapping[int, tuple[tuple[int, ...], ...]]

    def accesses(self, program: int) -> tuple[Access, ...]:
        """Accesses of a program's kernels by every target's evidence, by kernel, target and buffer."""
        return self.accesses_of.get(program, ())

    def edges(self, program: int) -> tuple[Edge, ...]:
        """Edges of a program, sorted; one per (source, destination, buffer, hazard). RAW edges are complete."""
        return self.edges_of.get(program, ())

    def chains(self, program: int) -> tuple[tuple[int, ...], ...]:
        """Groups of kernels that must share a device: they fill one buffer, and not by exact, disjoint writes, or a
        collective ties them.

        Every group has at least two kernels, ascending; groups are disjoint. State buffers are left out: their
        writers stay together because state has homes.
        """
        return self.chains_of.get(program, ())

    def ordering(self, program: int) -> tuple[tuple[int, int], ...]:
        """The fewest (earlier, later) pairs whose transitive closure orders all kernels as the edges do.

        For drawing and for scheduling on one device only: what must be shipped is said by the RAW edges.
        """
        return transitive_reduction((edge.source, edge.destination) for edge in self.edges(program))


def transitive_reduction(pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The transitive reduction of an acyclic graph whose edges all go from a smaller number to a larger one."""
    before: dict[int, set[int]] = defaultdict(set)
    for source, destination in pairs:
        assert source < destination, "a dependency goes forward in program order"
        before[destination].add(source)
    reached: dict[int, int] = {}  # node -> bit set of everything before it
    kept: list[tuple[int, int]] = []
    for node in sorted(before):
        behind = 0
        for source in sorted(before[node], reverse=True):
            if not behind >> source & 1:
                kept.append((source, node))
                behind |= reached.get(source, 0) | 1 << source
        reached[node] = behind
    return tuple(sorted(kept))


def weaker(first: Evidence, second: Evidence) -> Evidence:
    """The weaker of two kinds of evidence."""
    return min(first, second, key=WEAKEST_FIRST.index)


def looser(first: Precision, second: Precision) -> Precision:
    """The looser of two precisions."""
    return min(first, second, key=LOOSEST_FIRST.index)


def union_of_edges(edges: Iterable[Edge]) -> tuple[Edge, ...]:
    """One edge per (program, source, destination, buffer, hazard), sorted.

    Boxes are united; what one target can't ship alone can't be shipped alone; the weakest evidence remains.
    """
    united: dict[tuple[int, int, int, int, str], Edge] = {}
    for edge in edges:
        key = (edge.program, edge.source, edge.destination, edge.buffer, edge.hazard)
        other = united.get(key)
        if other is None:
            united[key] = edge
        elif other != edge:
            united[key] = replace(
                other,
                boxes=None
                if other.boxes is None or edge.boxes is None
                else tuple(dict.fromkeys((*other.boxes, *edge.boxes))),
                must=other.must and edge.must,
                evidence=weaker(other.evidence, edge.evidence),
            )
    return tuple(united[key] for key in sorted(united))


def union_of_chains(groups: Iterable[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Join groups that share a kernel, transitively; sorted, single kernels dropped."""
    parent: dict[int, int] = {}

    def root(kernel: int) -> int:
        while parent.setdefault(kernel, kernel) != kernel:
            parent[kernel] = kernel = parent[parent[kernel]]
        return kernel

    for group in groups:
        for kernel in group[1:]:
            parent[root(kernel)] = root(group[0])
    joined: dict[int, list[int]] = defaultdict(list)
    for kernel in sorted(parent):
        joined[root(kernel)].append(kernel)
    return tuple(sorted(tuple(group) for group in joined.values() if len(group) > 1))


def load_deps(path: Path | str) -> Deps:
    """Read a deps artifact; raises the errors of :func:`tessera_formats.deps.read_deps`."""
    return deps_from_bundle(read_deps(path))


def deps_from_bundle(bundle: Bundle) -> Deps:
    """The graph of an opened deps artifact."""
    accesses: dict[int, list[Access]] = defaultdict(list)
    for row in bundle.table("accesses").to_pylist():
        accesses[row["program"]].append(Access(**{**row, "boxes": boxes_from_rows(row["boxes"])}))
    edges: dict[int, list[Edge]] = defaultdict(list)
    for row in bundle.table("edges").to_pylist():
        del row["target"]
        edges[row["program"]].append(Edge(**{**row, "boxes": boxes_from_rows(row["boxes"])}))
    chains: dict[int, dict[tuple[str, int], list[int]]] = defaultdict(lambda: defaultdict(list))
    for row in bundle.table("chains").to_pylist():
        chains[row["program"]][row["target"], row["chain"]].append(row["kernel"])
    return Deps(
        digest=bundle.digest,
        program_digest=str(bundle.info["program_digest"]),
        targets=tuple(bundle.info["targets"]),
        accesses_of={
            program: tuple(sorted(found, key=lambda a: (a.kernel, a.target, a.buffer)))
            for program, found in accesses.items()
        },
        edges_of={program: union_of_edges(found) for program, found in edges.items()},
        chains_of={program: union_of_chains(list(groups.values())) for program, groups in chains.items()},
    )
