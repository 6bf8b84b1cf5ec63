"""What a placement costs on any number of devices, in arrays: the figures of
:func:`tessera_core.plan.placement.cost` in a millisecond or two, for searches that weigh hundreds of placements.

A placement is here one device per unit; state writers run wherever their state is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera_core.plan.problem import Problem

Floats = npt.NDArray[np.float64]
Devices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Of one placement, over a cycle: ``devices_us`` per device, ``wires_us`` per pair, ``path_us`` of one slot's
    iterations; ``memory_bytes`` per domain."""

    devices_us: Floats
    wires_us: Floats
    path_us: float
    memory_bytes: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """The fed paths of all programs: their ``units`` with their ``times`` over a cycle, shape (units, devices), and
    the steps along which something is handed on, ``rates`` times in a cycle: both ends and the largest size."""

    units: Devices
    times: Floats
    before: Devices
    after: Devices
    sizes: Floats
    rates: Floats


@dataclass(frozen=True, kw_only=True)
class LoadModel:
    """The arrays of a problem. Sparse matrices have a column per unit.

    ``times``: over a cycle, shape (units, devices). ``flow_often``: how often a flow is shipped in one.
    ``writer_leader``: whose device a state writer takes where nobody else needs the state.
    """

    problem: Problem
    times: Floats
    writers: Devices
    writer_leader: Devices
    writer_users: Any
    flow_often: Floats
    flow_producer: Devices
    flow_size: Floats
    flow_feeds: npt.NDArray[np.bool_]
    flow_users: Any
    resident_size: Floats
    resident_users: Any
    program_users: Any
    send: Floats
    receive: Floats
    copy: Floats
    occupies: npt.NDArray[np.bool_]
    cross: Floats
    domain_of: Floats
    paths: Paths

    def runs(self, devices: Devices) -> npt.NDArray[np.bool_]:
        """Which unit runs where, shape (units, devices)."""
        count = len(self.problem.devices)
        runs: npt.NDArray[np.bool_] = devices[:, None] == np.arange(count)[None, :]
        if len(self.writers):
            alone = runs[self.writer_leader]
            runs[self.writers] = False
            for _ in range(2):  # a state writer may itself read the state that another one writes
                needed = self.writer_users @ runs.astype(np.int32) > 0
                runs[self.writers] = np.where(needed.any(axis=1)[:, None], needed, alone)
        return runs

    def load(self, devices: Devices) -> Load:
        """What a placement costs."""
        problem, count = self.problem, len(self.problem.devices)
        runs = self.runs(devices)
        loads = (self.times * runs).sum(axis=0)
        held = runs[self.flow_producer]
        flows, to = np.nonzero((self.flow_users @ runs.astype(np.int32) > 0) & ~held)
        if count > 2:
            away = np.where(held[flows], self._cross(flows, to), np.inf)
            origin = np.argmin(away, axis=1)
        else:
            origin = 1 - to
        often, size = self.flow_often[flows], self.flow_size[flows]
        wire = size * self.copy[origin, to]
        busy = self.occupies[origin, to]
        np.add.at(loads, origin, often * (self.send[origin, to] + np.where(busy, wire, 0.0)))
        np.add.at(loads, to, often * np.where(self.flow_feeds[flows], 0.0, self.receive[origin, to]))
        wires = np.zeros((count, count))
        np.add.at(wires, (origin, to), often * np.where(busy, 0.0, wire))
        used = self.program_users @ runs.astype(np.int32) > 0
        loads += np.array(problem.rates) @ used * np.array(problem.overheads)
        held_bytes = ((self.resident_users @ runs.astype(np.int32) > 0) * self.resident_size[:, None]).sum(
            axis=0
        )
        np.add.at(held_bytes, to, size * problem.slots)
        return Load(
            devices_us=loads,
            wires_us=wires,
            path_us=self._path_us(devices),
            memory_bytes=self.domain_of @ held_bytes,
        )

    def objective_us(self, load: Load) -> float:
        """Interval; what is over in memory makes it larger than any that fits."""
        problem = self.problem
        total = max(load.devices_us.max(), load.wires_us.max(), load.path_us / problem.slots)
        for held, (size, _) in zip(load.memory_bytes, problem.domains, strict=True):
            if held > size:
                total += 1e12 * held / max(size, 1)
        return float(total)

    def _cross(self, flows: Devices, to: Devices) -> Floats:
        """End of producer to start of consumer from every device, shape (crossings, devices)."""
        return self.cross[:, to].T + self.flow_size[flows][:, None] * self.copy[:, to].T

    def _path_us(self, devices: Devices) -> float:
        paths = self.paths
        time = paths.times[np.arange(len(paths.units)), devices[paths.units]].sum()
        s, d = devices[paths.before], devices[paths.after]
        crossing = np.where(s != d, self.cross[s, d] + paths.sizes * self.copy[s, d], 0.0)
        return float(time + paths.rates @ crossing)


def load_model(problem: Problem) -> LoadModel:
    """The arrays of ``problem``."""
    count, units = len(problem.devices), len(problem.units)
    send, receive, copy, cross = (np.zeros((count, count)) for _ in range(4))
    occupies = np.zeros((count, count), dtype=bool)
    for (s, d), link in problem.links.items():
        send[s, d], receive[s, d], copy[s, d] = link.send_us, link.receive_us, link.wire_us(1)
        cross[s, d] = link.send_us + link.latency_us + link.receive_us + problem.overheads[d]
        occupies[s, d] = link.occupies_sender
    users: dict[int, set[int]] = {}
    leaders: dict[int, int] = {}
    for family in problem.families:
        readers = set(family.units) - set(family.writers)
        for writer in family.writers:
            users.setdefault(writer, set()).update(readers)
            leaders.setdefault(writer, family.writers[0])
    writers = sorted(users)
    domain_of = np.zeros((len(problem.domains), count))
    for index, (_, members) in enumerate(problem.domains):
        domain_of[index, list(members)] = 1.0
    return LoadModel(
        problem=problem,
        times=np.array(problem.cycle_times),
        writers=np.array(writers, dtype=np.int64),
        writer_leader=np.array([leaders[writer] for writer in writers], dtype=np.int64),
        writer_users=incidence([users[writer] for writer in writers], units),
        flow_often=np.array([problem.shipped(f) for f in problem.flows], dtype=float),
        flow_producer=np.array([f.producer for f in problem.flows], dtype=np.int64),
        flow_size=np.array([f.size for f in problem.flows], dtype=float),
        flow_feeds=np.array([f.feeds for f in problem.flows], dtype=bool),
        flow_users=incidence([f.consumers for f in problem.flows], units),
        resident_size=np.array([r.size for r in problem.residents], dtype=float),
        resident_users=incidence([r.users for r in problem.residents], units),
        program_users=incidence([r.users for r in problem.activations], units),
        send=send,
        receive=receive,
        copy=copy,
        occupies=occupies,
        cross=cross,
        domain_of=domain_of,
        paths=_paths(problem),
    )


def _paths(problem: Problem) -> Paths:
    paths = list(zip(problem.rates, problem.paths, strict=True))
    steps = [
        (rate, *step) for rate, found in zip(problem.rates, problem.path_steps, strict=True) for step in found
    ]
    times = [
        [rate * time for time in problem.units[unit].times[p]]
        for p, (rate, path) in enumerate(paths)
        for unit in path
    ]
    return Paths(
        units=np.array([unit for path in problem.paths for unit in path], dtype=np.int64),
        times=np.array(times, dtype=float).reshape(-1, len(problem.devices)),
        before=np.array([before for _, before, _, _ in steps], dtype=np.int64),
        after=np.array([after for _, _, after, _ in steps], dtype=np.int64),
        sizes=np.array([size for *_, size in steps], dtype=float),
        rates=np.array([rate for rate, *_ in steps], dtype=float),
    )


def incidence(sets: Sequence[Iterable[int]], columns: int) -> Any:
    """A sparse matrix of ones, shape (sets, columns): row i holds a one for each member of set i."""
    from scipy.sparse import csr_array

    listed = [sorted(who) for who in sets]
    rows = [row for row, who in enumerate(listed) for _ in who]
    flat = [unit for who in listed for unit in who]
    return csr_array(
        (np.ones(len(flat), dtype=np.int32), (rows, flat)), shape=(len(listed), columns), dtype=np.int32
    )
