"""The launches of a captured target as the analysis reads them: by kernel, with every pointer and their order.

Scratch memory of a compiler or library is numbered after the program's buffers, so that a launch's pointers
speak of both alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tessera_core.program.ir import Trace
from tessera_core.ptx.analysis import Relocation
from tessera_formats.bundle import Bundle


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One launch. ``relocations`` point into buffers and scratch; ``before`` are the kernel's launches that have
    surely ended when it starts, None: all with smaller numbers."""

    number: int
    op: int | None
    kind: str
    module: str | None
    function: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    parameters: bytes
    relocations: tuple[Relocation, ...]
    before: frozenset[int] | None

    @property
    def buffers(self) -> tuple[int, ...]:
        """Buffers and scratch that it is given, each once, in the order of its parameters."""
        return tuple(dict.fromkeys(relocation.buffer for relocation in self.relocations))


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetLaunches:
    """All launches of a target. ``complete``: they were read back from a GPU, so that nothing else was launched.

    ``texts``: PTX by module. ``carried``: scratch of a library, which lives on when a kernel has ended;
    ``scratch_bytes`` by number, of all scratch.
    """

    by_kernel: Mapping[tuple[int, int], tuple[Launch, ...]]
    texts: Mapping[str, str]
    scratch_bytes: Mapping[int, int]
    carried: frozenset[int]
    complete: bool


def target_launches(trace: Trace, bundle: Bundle, target: str) -> TargetLaunches:
    """Read a target's tables; those that it lacks count as empty."""
    tables = {
        name.rpartition("/")[2]: bundle.table(name)
        for name in bundle.entries
        if name.startswith(f"targets/{target}/")
    }

    def rows(name: str) -> list[dict[str, Any]]:
        return tables[name].to_pylist() if name in tables else []

    first_scratch = len(trace.buffers)
    scratch = {first_scratch + row["workspace"]: row for row in rows("workspaces")}
    pointers: dict[tuple[int, int, int], list[Relocation]] = defaultdict(list)
    for row in rows("pointers"):
        place = Relocation(row["offset"], first_scratch + row["workspace"], row["byte_offset"])
        pointers[row["program"], row["kernel"], row["launch"]].append(place)
    edges: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for row in rows("launch_edges"):
        edges[row["program"], row["kernel"]].append((row["source"], row["destination"]))
    complete = bool(rows("capture"))
    by_kernel: dict[tuple[int, int], list[Launch]] = defaultdict(list)
    orders: dict[tuple[int, int], Mapping[int, frozenset[int]]] = {}
    for row in sorted(rows("launches"), key=lambda r: (r["program"], r["kernel"], r["launch"])):
        place_of = (row["program"], row["kernel"])
        if complete and place_of not in orders:
            orders[place_of] = _ancestors(edges[place_of])
        relocations = [Relocation(r["offset"], r["buffer"], r["byte_offset"]) for r in row["relocations"]]
        relocations += pointers[row["program"], row["kernel"], row["launch"]]
        by_kernel[place_of].append(
            Launch(
                number=row["launch"],
                op=row["op"],
                kind=row["kind"],
                module=row["module"],
                function=row["function"],
                grid=_three(row["grid"]),
                block=_three(row["block"]),
                cluster=_three(row["cluster"]),
                shared_bytes=row["shared_bytes"],
                parameters=row["parameters"],
                relocations=tuple(sorted(relocations, key=lambda r: r.offset)),
                before=orders[place_of].get(row["launch"], frozenset()) if complete else None,
            )
        )
    return TargetLaunches(
        by_kernel={place: tuple(found) for place, found in by_kernel.items()},
        texts={row["module"]: row["text"] for row in rows("modules") if row["language"] == "ptx"},
        scratch_bytes={number: row["bytes"] for number, row in scratch.items()},
        carried=frozenset(number for number, row in scratch.items() if row["scope"] == "library"),
        complete=complete,
    )


def _ancestors(edges: Sequence[tuple[int, int]]) -> Mapping[int, frozenset[int]]:
    """Everything before each node of an acyclic graph."""
    sources: dict[int, set[int]] = defaultdict(set)
    for source, destination in edges:
        sources[destination].add(source)
    found: dict[int, frozenset[int]] = {}
    for node in sources:
        reached: set[int] = set()
        waiting = [node]
        while waiting:
            for source in sources.get(waiting.pop(), ()):
                if source not in reached:
                    reached.add(source)
                    waiting.append(source)
        found[node] = frozenset(reached)
    return found


def _three(extents: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*extents, 1, 1, 1)[:3]
    return x, y, z
