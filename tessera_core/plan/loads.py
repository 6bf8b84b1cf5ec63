"""What a placement costs on any number of devices, in arrays: the figures of
:func:`tessera_core.plan.placement.cost` in a millisecond or two, for searches that weigh hundreds of placements.

A placement is here one device per unit; state writers run wherever their state is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera_core.plan.problem import Problem

Floats = npt.NDArray[np.float64]
Devices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Of one placement: ``devices_us`` and ``wires_us`` per program and device or pair, ``path_us`` per program,
    ``memory_bytes`` per domain."""

    devices_us: Floats
    wires_us: Floats
    path_us: Floats
    memory_bytes: Floats


@dataclass(frozen=True, kw_only=True)
class LoadModel:
    """The arrays of a problem. Sparse matrices have a column per unit.

    ``writer_leader``: whose device a state writer takes where nobody else needs the state.
    """

    problem: Problem
    times: Floats
    writers: Devices
    writer_leader: Devices
    writer_users: Any
    flow_program: Devices
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
    paths: tuple[tuple[Devices, Devices, Devices, Floats], ...]

    def runs(self, devices: Devices) -> npt.NDArray[np.bool_]:
        """Which unit runs where, shape (units, devices)."""
        count = len(self.problem.devices)
        runs = devices[:, None] == np.arange(count)[None, :]
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
        programs = len(problem.programs)
        runs = self.runs(devices)
        loads = np.einsum("pud,ud->pd", self.times, runs)
        held = runs[self.flow_producer]
        flows, to = np.nonzero((self.flow_users @ runs.astype(np.int32) > 0) & ~held)
        if count > 2:
            away = np.where(held[flows], self._cross(flows, to), np.inf)
            origin = np.argmin(away, axis=1)
        else:
            origin = 1 - to
        p, size = self.flow_program[flows], self.flow_size[flows]
        wire = size * self.copy[origin, to]
        busy = self.occupies[origin, to]
        np.add.at(loads, (p, origin), self.send[origin, to] + np.where(busy, wire, 0.0))
        np.add.at(loads, (p, to), np.where(self.flow_feeds[flows], 0.0, self.receive[origin, to]))
        wires = np.zeros((programs, count, count))
        np.add.at(wires, (p, origin, to), np.where(busy, 0.0, wire))
        used = self.program_users @ runs.astype(np.int32) > 0
        loads += used * np.array(problem.overheads)
        held_bytes = ((self.resident_users @ runs.astype(np.int32) > 0) * self.resident_size[:, None]).sum(
            axis=0
        )
        np.add.at(held_bytes, to, size * problem.slots)
        return Load(
            devices_us=loads,
            wires_us=wires,
            path_us=np.array([self._path_us(q, devices) for q in range(programs)]),
            memory_bytes=self.domain_of @ held_bytes,
        )

    def objective_us(self, load: Load) -> float:
        """Rate-weighted interval; what is over in memory makes it larger than any that fits."""
        problem = self.problem
        total = 0.0
        for p, rate in enumerate(problem.rates):
            resource = max(load.devices_us[p].max(), load.wires_us[p].max())
            total += rate * max(resource, load.path_us[p] / problem.slots)
        for held, (size, _) in zip(load.memory_bytes, problem.domains, strict=True):
            if held > size:
                total += 1e12 * held / max(size, 1)
        return float(total)

    def _cross(self, flows: Devices, to: Devices) -> Floats:
        """End of producer to start of consumer from every device, shape (crossings, devices)."""
        return self.cross[:, to].T + self.flow_size[flows][:, None] * self.copy[:, to].T

    def _path_us(self, program: int, devices: Devices) -> float:
        units, before, after, sizes = self.paths[program]
        if not len(units):
            return 0.0
        time = float(self.times[program][units, devices[units]].sum())
        s, d = devices[before], devices[after]
        return time + float(np.where(s != d, self.cross[s, d] + sizes * self.copy[s, d], 0.0).sum())


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
    residents = [(r.size, r.users) for r in problem.weights]
    residents += [(r.size * problem.slots, r.users) for r in problem.activations]
    residents += [(f.size * problem.slots, f.units) for f in problem.families]
    domain_of = np.zeros((len(problem.domains), count))
    for index, (_, members) in enumerate(problem.domains):
        domain_of[index, list(members)] = 1.0
    return LoadModel(
        problem=problem,
        times=np.array([unit.times for unit in problem.units], dtype=float).transpose(1, 0, 2).copy(),
        writers=np.array(writers, dtype=np.int64),
        writer_leader=np.array([leaders[writer] for writer in writers], dtype=np.int64),
        writer_users=_incidence([users[writer] for writer in writers], units),
        flow_program=np.array([f.program for f in problem.flows], dtype=np.int64),
        flow_producer=np.array([f.producer for f in problem.flows], dtype=np.int64),
        flow_size=np.array([f.size for f in problem.flows], dtype=float),
        flow_feeds=np.array([f.feeds for f in problem.flows], dtype=bool),
        flow_users=_incidence([f.consumers for f in problem.flows], units),
        resident_size=np.array([size for size, _ in residents], dtype=float),
        resident_users=_incidence([who for _, who in residents], units),
        program_users=_incidence([r.users for r in problem.activations], units),
        send=send,
        receive=receive,
        copy=copy,
        occupies=occupies,
        cross=cross,
        domain_of=domain_of,
        paths=tuple(_path(problem, path) for path in problem.paths),
    )


def _path(problem: Problem, path: tuple[int, ...]) -> tuple[Devices, Devices, Devices, Floats]:
    """Units of a fed path; of its steps along which something is handed on, both ends and the largest size."""
    largest: dict[tuple[int, int], int] = {}
    for flow in problem.flows:
        for unit in () if flow.feeds else flow.consumers:
            largest[flow.producer, unit] = max(largest.get((flow.producer, unit), 0), flow.size)
    steps = [pair for pair in pairwise(path) if pair in largest]
    return (
        np.array(path, dtype=np.int64),
        np.array([before for before, _ in steps], dtype=np.int64),
        np.array([after for _, after in steps], dtype=np.int64),
        np.array([largest[pair] for pair in steps], dtype=float),
    )


def _incidence(sets: Any, columns: int) -> Any:
    from scipy.sparse import csr_array

    listed = [sorted(who) for who in sets]
    rows = [row for row, who in enumerate(listed) for _ in who]
    flat = [unit for who in listed for unit in who]
    return csr_array((np.ones(len(flat), dtype=np.int32), (rows, flat)), shape=(len(listed), columns), dtype=np.int32)
