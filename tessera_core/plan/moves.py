"""A placement that changes one unit at a time, with its cost kept up to date: what local search walks on.

A move costs what the unit's own transfers, weights and state do, whatever the size of the model. The figures are
those of :func:`tessera_core.plan.placement.cost`, but for a buffer whose copying producer runs on several devices:
it is charged from the first of them, where the exact cost takes the nearest.
"""

from __future__ import annotations

from collections.abc import Sequence

from tessera_core.plan.problem import Problem


class Moves:
    """A placement of ``problem``: one device per unit; state writers run wherever their state is needed.

    ``loads_us[d]``, ``wires_us[s][d]``, ``path_us`` over a cycle, ``memory_bytes[domain]``: its cost as it stands.
    """

    def __init__(self, problem: Problem, devices: Sequence[int]) -> None:
        count, programs, units = len(problem.devices), len(problem.programs), len(problem.units)
        self.problem = problem
        self.devices = list(devices)
        self.loads_us = [0.0] * count
        self.wires_us = [[0.0] * count for _ in range(count)]
        self.path_us = 0.0
        self._often = [problem.shipped(flow) for flow in problem.flows]
        self.memory_bytes = [0] * len(problem.domains)
        self._domain = [
            next((i for i, (_, members) in enumerate(problem.domains) if d in members), -1)
            for d in range(count)
        ]
        self._links = {
            pair: (link.send_us, link.receive_us, link.wire_us(1), link.occupies_sender)
            for pair, link in problem.links.items()
        }
        self._produced: list[list[int]] = [[] for _ in range(units)]
        self._consumed: list[list[int]] = [[] for _ in range(units)]
        for index, flow in enumerate(problem.flows):
            self._produced[flow.producer].append(index)
            for unit in flow.consumers:
                self._consumed[unit].append(index)
        self._needed = [[0] * count for _ in problem.flows]
        self._runs: list[list[int]] = [[] for _ in range(units)]
        self._sizes = [resident.size for resident in problem.residents]
        self._held = [[0] * count for _ in problem.residents]
        self._residents = _by_unit(units, [resident.users for resident in problem.residents])
        self._programs = _by_unit(units, [r.users for r in problem.activations])
        self._used = [[0] * count for _ in range(programs)]
        self._into, self._out, self._on_path = _paths(problem)
        self._readers: dict[int, list[int]] = {}
        self._leaders: dict[int, int] = {}
        for family in problem.families:
            for writer in family.writers:
                self._readers.setdefault(writer, [0] * count)
                self._leaders.setdefault(writer, family.writers[0])
        self._written = [
            sorted(
                {w for family in problem.families if unit in family.units for w in family.writers} - {unit}
            )
            for unit in range(units)
        ]
        own = {writer: {f.name for f in problem.families if writer in f.writers} for writer in self._readers}
        for unit in self._readers:  # writers of one family follow its readers, not each other
            self._written[unit] = [w for w in self._written[unit] if own[w] != own[unit]]
        for unit in range(units):
            if unit not in self._readers:
                self._enter(unit, self.devices[unit])
        for unit in self._readers:
            if not self._runs[unit]:
                self._enter(unit, self.devices[self._leaders[unit]])
        for unit in range(units):
            for rate, before, size in self._into[unit]:
                self.path_us += rate * self._step_us(before, unit, size)

    @property
    def objective_us(self) -> float:
        """Interval of the cycle, whether or not it fits in memory."""
        wire = max(max(row) for row in self.wires_us)
        return max(*self.loads_us, wire, self.path_us / self.problem.slots)

    @property
    def excess_bytes(self) -> int:
        """Memory beyond what there is."""
        return sum(
            max(0, held - size)
            for held, (size, _) in zip(self.memory_bytes, self.problem.domains, strict=True)
        )

    @property
    def movable(self) -> list[int]:
        """Units that may be moved by themselves."""
        return [unit for unit in range(len(self.devices)) if unit not in self._readers]

    def move(self, unit: int, device: int) -> None:
        """Let ``unit`` (one of :attr:`movable`) run on ``device`` instead of where it runs."""
        before = self.devices[unit]
        if before == device:
            return
        self._step_costs(unit, -1)
        self._leave(unit, before)
        self.devices[unit] = device
        self._enter(unit, device)
        self._step_costs(unit, 1)

    def _enter(self, unit: int, device: int) -> None:
        """Run ``unit`` on ``device``, and whatever writes the state that it needs."""
        self._start(unit, device)
        for writer in self._written[unit]:
            readers = self._readers[writer]
            readers[device] += 1
            if readers[device] == 1 and device not in self._runs[writer]:
                alone = not any(count for d, count in enumerate(readers) if d != device)
                for d in list(self._runs[writer]) if alone else ():
                    self._leave(writer, d)  # it ran there for want of a reader
                self._enter(writer, device)

    def _leave(self, unit: int, device: int) -> None:
        self._stop(unit, device)
        for writer in self._written[unit]:
            readers = self._readers[writer]
            readers[device] -= 1
            if not readers[device] and any(readers):
                self._leave(writer, device)

    def _start(self, unit: int, device: int) -> None:
        self._count(unit, device, 1)
        for flow in self._produced[unit]:
            self._ship(flow, -1)
        self._runs[unit] = sorted([*self._runs[unit], device])
        for flow in self._produced[unit]:
            self._ship(flow, 1)
        for flow in self._consumed[unit]:
            self._needed[flow][device] += 1
            if self._needed[flow][device] == 1:
                self._cross(flow, device, 1)

    def _stop(self, unit: int, device: int) -> None:
        self._count(unit, device, -1)
        for flow in self._consumed[unit]:
            self._needed[flow][device] -= 1
            if not self._needed[flow][device]:
                self._cross(flow, device, -1)
        for flow in self._produced[unit]:
            self._ship(flow, -1)
        self._runs[unit] = [d for d in self._runs[unit] if d != device]
        for flow in self._produced[unit]:
            self._ship(flow, 1)

    def _count(self, unit: int, device: int, sign: int) -> None:
        """Time, weights, state, activations and the overhead of a first kernel."""
        self.loads_us[device] += sign * self.problem.cycle_times[unit][device]
        for p in self._programs[unit]:
            was = self._used[p][device]
            self._used[p][device] += sign
            if not was or not self._used[p][device]:
                self.loads_us[device] += sign * self.problem.rates[p] * self.problem.overheads[device]
        for resident in self._residents[unit]:
            held = self._held[resident]
            was = held[device]
            held[device] += sign
            if not was or not held[device]:
                self._remember(device, sign * self._sizes[resident])
        for p in self._on_path[unit]:
            self.path_us += sign * self.problem.rates[p] * self.problem.units[unit].times[p][device]

    def _ship(self, flow: int, sign: int) -> None:
        """All crossings of a flow."""
        for device, needed in enumerate(self._needed[flow]):
            if needed:
                self._cross(flow, device, sign)

    def _cross(self, index: int, device: int, sign: int) -> None:
        """A flow's crossing to ``device``, if its producer does not run there."""
        flow = self.problem.flows[index]
        runs = self._runs[flow.producer]
        if not runs or device in runs:
            return
        source = runs[0]
        send, receive, copy, occupies = self._links[source, device]
        often, wire = sign * self._often[index], flow.size * copy
        self.loads_us[source] += often * (send + wire if occupies else send)
        if not flow.feeds:
            self.loads_us[device] += often * receive
        if not occupies:
            self.wires_us[source][device] += often * wire
        self._remember(device, sign * flow.size * self.problem.slots)

    def _remember(self, device: int, size: int) -> None:
        if self._domain[device] >= 0:
            self.memory_bytes[self._domain[device]] += size

    def _step_costs(self, unit: int, sign: int) -> None:
        """What it costs to cross along the fed path before and after ``unit``."""
        for rate, before, size in self._into[unit]:
            self.path_us += sign * rate * self._step_us(before, unit, size)
        for rate, after, size in self._out[unit]:
            self.path_us += sign * rate * self._step_us(unit, after, size)

    def _step_us(self, before: int, after: int, size: int) -> float:
        s, d = self.devices[before], self.devices[after]
        return 0.0 if s == d else self.problem.cross_us(size, s, d)


def _by_unit(units: int, users: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each unit, the indices of the sets that it is in."""
    found: list[list[int]] = [[] for _ in range(units)]
    for index, who in enumerate(users):
        for unit in who:
            found[unit].append(index)
    return found


Steps = list[list[tuple[int, int, int]]]


def _paths(problem: Problem) -> tuple[Steps, Steps, list[list[int]]]:
    """For each unit: steps of fed paths that end and begin there, as (rate, other unit, bytes), and its paths."""
    into: Steps = [[] for _ in problem.units]
    out: Steps = [[] for _ in problem.units]
    for rate, steps in zip(problem.rates, problem.path_steps, strict=True):
        for before, after, size in steps:
            into[after].append((rate, before, size))
            out[before].append((rate, after, size))
    return into, out, _by_unit(len(problem.units), problem.paths)
