"""Many devices of few types: the problem between types, whose bound holds for the devices, and a placement of the
devices made from one of the types.

All devices of a type together do at least what the type does, so a type that is n devices takes 1/n of the time,
and what moves between two of them is left out: no placement undercuts that. A placement of the types becomes one of
the devices by cutting each type's kernels, in program order, into runs of equal time, one for each device, or into
more and smaller pieces, which even out the devices and spread what is shipped over their links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tessera_core.plan.loads import Devices, LoadModel
from tessera_core.plan.problem import Problem

PIECES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""How many pieces a device gets of its type's kernels, as tried."""
NEARNESS = 0.3
"""By how much of a piece a device may do more than the least busy one and still be given its neighbour's neighbour."""
PASSES = 12
"""How often the ends of runs are moved at one step size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Types:
    """Devices by type: ``members[t]`` are indices of the problem's devices, alike in times, overhead and memory."""

    members: tuple[tuple[int, ...], ...]

    @property
    def copies(self) -> tuple[int, ...]:
        """How many devices each type has."""
        return tuple(len(members) for members in self.members)


def types_of(problem: Problem) -> Types:
    """Groups of devices that the cost model cannot tell apart but by their links."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for d, device in enumerate(problem.devices):
        alone = sum(d in members for _, members in problem.domains) == sum(
            members == (d,) for _, members in problem.domains
        )
        key = (device.type, problem.overheads[d], device.capacity_bytes, None if alone else d)
        groups.setdefault(key, []).append(d)
    return Types(members=tuple(tuple(members) for members in groups.values()))


def between_types(problem: Problem, types: Types) -> Problem:
    """The problem with one device per type, whose times are a single device's.

    Links are the best of those between two types; the domains of a type's devices are one.
    """
    first = [members[0] for members in types.members]
    count = len(first)
    links = {}
    for s in range(count):
        for d in range(count):
            if s != d:
                pairs = [problem.links[a, b] for a in types.members[s] for b in types.members[d]]
                links[s, d] = replace(
                    pairs[0],
                    latency_us=min(link.latency_us for link in pairs),
                    gbit_per_s=max(link.gbit_per_s for link in pairs),
                    send_us=min(link.send_us for link in pairs),
                    receive_us=min(link.receive_us for link in pairs),
                    occupies_sender=all(link.occupies_sender for link in pairs),
                )
    domains = []
    for size, members in problem.domains:
        within = tuple(t for t, own in enumerate(types.members) if set(own) & set(members))
        domains.append((size, within))
    merged: dict[tuple[int, ...], int] = {}
    for size, within in domains:
        merged[within] = merged.get(within, 0) + size
    return replace(
        problem,
        devices=tuple(problem.devices[d] for d in first),
        links=links,
        overheads=tuple(problem.overheads[d] for d in first),
        domains=tuple((size, within) for within, size in merged.items()),
        units=tuple(
            replace(unit, times=tuple(tuple(times[d] for d in first) for times in unit.times))
            for unit in problem.units
        ),
    )


def among(problem: Problem, devices: Sequence[int]) -> Problem:
    """The problem on some of its devices."""
    place = {d: index for index, d in enumerate(devices)}
    domains = [(size, tuple(place[d] for d in members if d in place)) for size, members in problem.domains]
    return replace(
        problem,
        devices=tuple(problem.devices[d] for d in devices),
        links={(place[s], place[d]): link for (s, d), link in problem.links.items() if {s, d} <= set(place)},
        overheads=tuple(problem.overheads[d] for d in devices),
        domains=tuple((size, members) for size, members in domains if members),
        units=tuple(
            replace(unit, times=tuple(tuple(times[d] for d in devices) for times in unit.times))
            for unit in problem.units
        ),
    )


def expanded(model: LoadModel, types: Types, chosen: Sequence[int], order: Devices) -> Devices:
    """A device for each unit from a type for each: runs, or pieces of some size, whichever turns out best.

    ``order``: units in program order.
    """
    found = [spread(model, types, chosen, order)]
    found += [packed(model, types, chosen, order, pieces) for pieces in PIECES]
    return min(found, key=lambda devices: model.objective_us(model.load(devices)))


def packed(model: LoadModel, types: Types, chosen: Sequence[int], order: Devices, pieces: int) -> Devices:
    """Pieces of neighbouring units, about so many on each device; the largest goes first, to the device that does
    least, or to a neighbour's where that does hardly more.

    This evens out the devices where kernels are large, and many pairs of devices share what is shipped, at the price
    of more crossings within a type. It is the longest-processing-time rule of Graham, "Bounds on multiprocessing
    timing anomalies", SIAM J. Appl. Math. 17(2), 1969.
    """
    weights, devices = _weights(model, types, chosen), np.zeros(len(chosen), dtype=np.int64)
    for t, members in enumerate(types.members):
        own = [int(unit) for unit in order if chosen[unit] == t]
        most = float(weights[own].sum()) / len(members) / pieces
        parts = _pieces(own, weights, most)
        loads = [0.0] * len(members)
        place: dict[int, int] = {}
        for i in sorted(range(len(parts)), key=lambda i: -parts[i][0]):
            near = {place[j] for j in (i - 1, i + 1) if j in place}
            place[i] = min(
                range(len(members)), key=lambda d: (loads[d] - (NEARNESS * most if d in near else 0.0), d)
            )
            loads[place[i]] += parts[i][0]
            devices[parts[i][1]] = members[place[i]]
    return devices


def _pieces(
    units: Sequence[int], weights: npt.NDArray[np.float64], most: float
) -> list[tuple[float, list[int]]]:
    """Runs of neighbours that weigh ``most`` at most, or are one unit; each with its weight."""
    parts: list[tuple[float, list[int]]] = []
    for unit in units:
        weight = float(weights[unit])
        if parts and parts[-1][0] + weight <= most:
            parts[-1] = (parts[-1][0] + weight, [*parts[-1][1], unit])
        else:
            parts.append((weight, [unit]))
    return parts


def spread(model: LoadModel, types: Types, chosen: Sequence[int], order: Devices) -> Devices:
    """A device for each unit from a type for each: runs of equal time, whose ends then move while that helps.

    ``order``: units in program order. A move shifts the end of one device's run, or gives one unit of the busiest
    device to the neighbours of its type.
    """
    weights = _weights(model, types, chosen)
    ends = {
        t: _equal_runs(weights[own], len(types.members[t]))
        for t in range(len(types.members))
        if len(own := [u for u in order if chosen[u] == t])
    }
    owned = {t: np.array([u for u in order if chosen[u] == t], dtype=np.int64) for t in ends}
    best = _placed(model, types, owned, ends)
    least = model.objective_us(model.load(best))
    step = 8
    while step:
        for _ in range(PASSES):
            load = model.load(best)
            improved = False
            for t, ends_of in sorted(
                ends.items(), key=lambda item: -_busiest(load.devices_us, types, item[0])
            ):
                for i in _near_busiest(load.devices_us, types, t):
                    for change in (step, -step):
                        moved = ends_of.copy()
                        moved[i] = min(max(moved[i] + change, 0), len(owned[t]))
                        if (i and moved[i] < moved[i - 1]) or (
                            i + 1 < len(moved) and moved[i] > moved[i + 1]
                        ):
                            continue
                        devices = _placed(model, types, owned, {**ends, t: moved})
                        value = model.objective_us(model.load(devices))
                        if value < least - 1e-9:
                            best, least, ends, improved = devices, value, {**ends, t: moved}, True
                            ends_of = moved
            if not improved:
                break
        step //= 2
    return best


def _weights(model: LoadModel, types: Types, chosen: Sequence[int]) -> npt.NDArray[np.float64]:
    """Time of each unit on its type over a cycle."""
    first = np.array([members[0] for members in types.members])[np.array(chosen)]
    return np.asarray(model.times[np.arange(len(first)), first])


def _equal_runs(weights: npt.NDArray[np.float64], devices: int) -> Devices:
    """Ends of runs of nearly equal weight, all but the last."""
    total = np.cumsum(weights)
    ends: Devices = np.searchsorted(total, total[-1] * np.arange(1, devices) / devices).astype(np.int64)
    return ends


def _placed(model: LoadModel, types: Types, owned: dict[int, Devices], ends: dict[int, Devices]) -> Devices:
    devices = np.zeros(len(model.problem.units), dtype=np.int64)
    for t, units in owned.items():
        run = np.searchsorted(ends[t], np.arange(len(units)), side="right")
        devices[units] = np.array(types.members[t], dtype=np.int64)[run]
    return devices


def _busiest(loads_us: npt.NDArray[np.float64], types: Types, t: int) -> float:
    return float(loads_us[list(types.members[t])].max())


def _near_busiest(loads_us: npt.NDArray[np.float64], types: Types, t: int) -> list[int]:
    """Ends of the run of the busiest device of a type."""
    members = list(types.members[t])
    at = int(np.argmax(loads_us[members]))
    return [i for i in (at - 1, at) if 0 <= i < len(members) - 1]
