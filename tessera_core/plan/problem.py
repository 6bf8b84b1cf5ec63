"""The cost model as data: what may be placed, what it costs where, and what it drags along.

A :class:`Problem` is one route's programs on some devices of a cluster, for a number of slots. It is what
the solvers read; the checker (:mod:`tessera_core.plan.evaluate`) derives the same quantities on its own.

The model, in microseconds. Per program and iteration:

- load of a device: its kernels' times; for each transfer that it sends, the link's ``send_us``, and the copy
  itself where the link occupies the sender; for each that it receives for this iteration, ``receive_us``; one
  segment overhead where it runs any kernel of the program. How many segments that takes is known only once they
  are cut, so the load is what the device does at least
- load of a directed link: the wire time of what crosses it, unless that occupies the sender already. Latency
  is not occupancy: it counts only in the latency of an iteration

A *cycle* is one batch of requests: of each program as many iterations as its rate says. The slots of a full
pipeline are spread over the programs, so that one prefills while others decode, and every resource does the work
of all programs:

- interval of the cycle: the largest sum over the programs of rate times load, or what one slot's batch takes at
  least, divided by the slots, whichever is larger: its iterations follow each other no faster than the longest
  path from what an iteration is fed to what it feeds its successor. This is the objective. What the last
  iteration of a batch makes feeds nothing and is not shipped; a route of one program repeats it without end
- latency: everything in a row, with one segment overhead for each transfer
- memory of a device: weights of the kernels that it runs; per slot the state of every family that has a home
  there (every program of the route holds its own), per program the peak of live activations of the whole
  program where any of its kernels runs there, and every received buffer
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from tessera_core.plan.cluster import Cluster, Device, Link
from tessera_core.plan.fed_path import fed_path
from tessera_core.plan.needs import ProgramNeeds, feeding
from tessera_core.profile.times import Condition, Times
from tessera_core.program.boxes import Box, union_bytes
from tessera_core.program.ir import Program, Trace

KernelKey = tuple[int, int]
"""(position of the program in the route, kernel id)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What is placed as one: a kernel, or kernels that must share a device.

    ``times[p][d]``: time of its kernels of program p on device d. ``replicable``: a state writer of kind
    copy, which runs on every home of its families instead of on one device.
    """

    kernels: tuple[KernelKey, ...]
    replicable: bool
    times: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """What a kernel writes and others read: it goes to each device that runs a consumer and not the producer.

    ``consumers`` are units. ``boxes`` None: the whole buffer is shipped. ``feeds``: it becomes an input of the
    next iteration, which takes it in.
    """

    program: int
    kernel: int
    producer: int
    buffer: int
    size: int
    boxes: tuple[Box, ...] | None
    consumers: tuple[int, ...]
    feeds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A state family: its bytes in one slot over all programs, who touches it, and who must run on all homes.

    ``writers``: the replicable units that write it. One that only reads it needs it where it runs, no more.
    """

    name: str
    size: int
    units: tuple[int, ...]
    writers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """Bytes that lie on a device where any of ``users`` runs there (weights; activations of a program)."""

    size: int
    users: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One route's programs on ``devices``; everything that solvers need, by index."""

    programs: tuple[Program, ...]
    rates: tuple[int, ...]
    slots: int
    devices: tuple[Device, ...]
    links: dict[tuple[int, int], Link]
    overheads: tuple[float, ...]
    domains: tuple[tuple[int, tuple[int, ...]], ...]
    units: tuple[Unit, ...]
    flows: tuple[Flow, ...]
    families: tuple[Family, ...]
    weights: tuple[Resident, ...]
    activations: tuple[Resident, ...]
    paths: tuple[tuple[int, ...], ...]

    @cached_property
    def cycle_times(self) -> tuple[tuple[float, ...], ...]:
        """Time of each unit on each device over a cycle, shape (units, devices)."""
        return tuple(
            tuple(
                sum(rate * times[d] for rate, times in zip(self.rates, unit.times, strict=True))
                for d in range(len(self.devices))
            )
            for unit in self.units
        )

    @cached_property
    def path_steps(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """Per program the steps of its fed path that hand something on: both units, and the largest size."""
        largest: dict[tuple[int, int], int] = {}
        for flow in self.flows:
            for unit in () if flow.feeds else flow.consumers:
                largest[flow.producer, unit] = max(largest.get((flow.producer, unit), 0), flow.size)
        return tuple(
            tuple((*pair, largest[pair]) for pair in pairwise(path) if pair in largest) for path in self.paths
        )

    @cached_property
    def residents(self) -> tuple[Resident, ...]:
        """All that lies on a device because of who runs there, with every slot's bytes: weights, activations, state."""
        return (
            *self.weights,
            *(Resident(size=r.size * self.slots, users=r.users) for r in self.activations),
            *(Resident(size=f.size * self.slots, users=f.units) for f in self.families),
        )

    def shipped(self, flow: Flow) -> int:
        """How often a flow is shipped in a cycle: what a batch's last iteration would feed isn't."""
        last = max((p for p, rate in enumerate(self.rates) if rate), default=0)
        spared = flow.feeds and flow.program == last and len(self.programs) > 1
        return max(self.rates[flow.program] - spared, 0)

    def send_us(self, size: int, source: int, destination: int) -> float:
        """Time that sending takes of the sending device."""
        link = self.links[source, destination]
        copy = link.wire_us(size) if link.occupies_sender else 0.0
        return link.send_us + copy

    def link_us(self, size: int, source: int, destination: int) -> float:
        """Time that the directed link is taken."""
        link = self.links[source, destination]
        return 0.0 if link.occupies_sender else link.wire_us(size)

    def receive_us(self, flow: Flow, source: int, destination: int) -> float:
        """Time that receiving a flow takes of the receiving device in the iteration that made it."""
        return 0.0 if flow.feeds else self.links[source, destination].receive_us

    def cross_us(self, size: int, source: int, destination: int) -> float:
        """End of the producer to start of the consumer, on idle devices: the consumer begins a segment."""
        link = self.links[source, destination]
        busy = self.send_us(size, source, destination) + self.link_us(size, source, destination)
        return busy + link.latency_us + link.receive_us + self.overheads[destination]


def build_problem(
    *,
    trace: Trace,
    needs: Sequence[ProgramNeeds],
    rates: Sequence[int],
    slots: int,
    cluster: Cluster,
    devices: Sequence[Device],
    times: Times,
    condition: Condition,
) -> Problem:
    """The cost model of a route through ``devices``; ``needs`` in phase order."""
    types = [device.type for device in devices]
    groups = _groups(trace, needs)
    unit_of = {key: index for index, (keys, _) in enumerate(groups) for key in keys}
    cache: dict[tuple[str, str], float] = {}

    def time_us(signature: str, device_type: str) -> float:
        if (signature, device_type) not in cache:
            cache[signature, device_type] = times.time(signature, device_type, condition).median_us
        return cache[signature, device_type]

    units = tuple(
        Unit(
            kernels=keys,
            replicable=replicable,
            times=tuple(
                tuple(
                    sum(time_us(need.program.kernels[k].signature, kind) for q, k in keys if q == position)
                    for kind in types
                )
                for position, need in enumerate(needs)
            ),
        )
        for keys, replicable in groups
    )
    place = {device.name: index for index, device in enumerate(devices)}
    flows = _flows(trace, needs, unit_of)
    return Problem(
        programs=tuple(need.program for need in needs),
        rates=tuple(rates),
        slots=slots,
        devices=tuple(devices),
        links={
            (place[a], place[b]): link for (a, b), link in cluster.links.items() if a in place and b in place
        },
        overheads=tuple(times.overhead_us(kind) for kind in types),
        domains=tuple(
            (size, tuple(i for i, device in enumerate(devices) if device.memory_domain == domain))
            for domain, size in cluster.domains.items()
            if any(device.memory_domain == domain for device in devices)
        ),
        units=units,
        flows=flows,
        families=_families(needs, unit_of, units),
        weights=_weights(trace, needs, unit_of),
        activations=tuple(
            Resident(
                size=need.activation_bytes,
                users=tuple(sorted({unit_of[p, kernel.id] for kernel in need.program.kernels})),
            )
            for p, need in enumerate(needs)
        ),
        paths=tuple(fed_path(trace, needs, p, unit_of, units) for p in range(len(needs))),
    )


def _flows(trace: Trace, needs: Sequence[ProgramNeeds], unit_of: dict[KernelKey, int]) -> tuple[Flow, ...]:
    consumers: dict[KernelKey, dict[int, set[int]]] = {}
    boxes_of: dict[tuple[int, int, int], tuple[Box, ...] | None] = {}
    feeds: set[tuple[int, int, int]] = set()
    for p, need in enumerate(needs):
        for kernel, buffer, boxes, readers in need.flows:
            consumers.setdefault((p, kernel), {})[buffer] = {unit_of[p, reader] for reader in readers}
            boxes_of[p, kernel, buffer] = boxes
    for p, output, q, target in feeding(trace, needs):
        if trace.buffers[output].kind == "state":
            continue
        for kernel in needs[p].writers.get(output, ())[-1:]:
            fed = {unit_of[q, reader] for reader in needs[q].readers.get(target, ())}
            consumers.setdefault((p, kernel), {}).setdefault(output, set()).update(fed)
            boxes_of[p, kernel, output] = None
            feeds.add((p, kernel, output))
    flows = []
    for (p, kernel), by_buffer in sorted(consumers.items()):
        for buffer, who in sorted(by_buffer.items()):
            boxes, whole = boxes_of[p, kernel, buffer], trace.buffers[buffer].bytes
            size = whole if boxes is None else union_bytes(boxes, whole)
            others = tuple(sorted(who - {unit_of[p, kernel]}))
            if others:
                flows.append(
                    Flow(
                        program=p,
                        kernel=kernel,
                        producer=unit_of[p, kernel],
                        buffer=buffer,
                        size=size,
                        boxes=boxes if size < whole else None,
                        consumers=others,
                        feeds=(p, kernel, buffer) in feeds,
                    )
                )
    return tuple(flows)


def _groups(trace: Trace, needs: Sequence[ProgramNeeds]) -> list[tuple[tuple[KernelKey, ...], bool]]:
    """Kernels that share a device, in order of their first kernel, and whether they are replicable."""
    parent: dict[KernelKey, KernelKey] = {
        (p, kernel.id): (p, kernel.id) for p, need in enumerate(needs) for kernel in need.program.kernels
    }

    def root(key: KernelKey) -> KernelKey:
        while parent[key] != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    def join(keys: Iterable[KernelKey]) -> None:
        roots = sorted({root(key) for key in keys})
        for other in roots[1:]:
            parent[other] = roots[0]

    bound: set[KernelKey] = set()
    for p, need in enumerate(needs):
        for together in (*need.chains, *need.output_writers):
            join((p, k) for k in together)
            bound.update((p, k) for k in together)
    replicable, single_home = _replicable(needs, bound)
    for name in sorted(single_home):
        join((p, k) for p, need in enumerate(needs) for k, names in need.families.items() if name in names)
    members: dict[KernelKey, list[KernelKey]] = defaultdict(list)
    for key in parent:
        members[root(key)].append(key)
    return [(tuple(members[key]), key in replicable) for key in sorted(members)]


def _replicable(needs: Sequence[ProgramNeeds], bound: set[KernelKey]) -> tuple[set[KernelKey], set[str]]:
    """Copying state writers that may run on several homes, and the families that have one home.

    A family has one home where some writer of it cannot run on several: one that computes, one that shares a
    device with others (``bound``), or one that touches another such family. Whatever touches it lives there too.
    """
    single_home: set[str] = set()
    replicable = {
        (p, k)
        for p, need in enumerate(needs)
        for k in need.written
        if need.program.kernels[k].state_writer == "copy"
    } - bound
    while True:
        rest = {(p, k) for p, k in replicable if not needs[p].families[k] & single_home}
        homes = {
            name
            for p, need in enumerate(needs)
            for k, names in need.written.items()
            if (p, k) not in rest
            for name in names
        }
        if homes == single_home:
            return rest, homes
        replicable, single_home = rest, homes


def _families(
    needs: Sequence[ProgramNeeds], unit_of: dict[KernelKey, int], units: Sequence[Unit]
) -> tuple[Family, ...]:
    users: dict[str, set[int]] = defaultdict(set)
    writers: dict[str, set[int]] = defaultdict(set)
    sizes: dict[str, int] = defaultdict(int)
    for p, need in enumerate(needs):
        for name, size in need.family_bytes.items():
            sizes[name] += size
        for kernel, names in need.families.items():
            for name in names:
                users[name].add(unit_of[p, kernel])
        for kernel, names in need.written.items():
            for name in names:
                writers[name].add(unit_of[p, kernel])
    return tuple(
        Family(
            name=name,
            size=sizes[name],
            units=tuple(sorted(users[name])),
            writers=tuple(sorted(u for u in writers[name] if units[u].replicable)),
        )
        for name in sorted(users)
    )


def _weights(
    trace: Trace, needs: Sequence[ProgramNeeds], unit_of: dict[KernelKey, int]
) -> tuple[Resident, ...]:
    users: dict[int, set[int]] = defaultdict(set)
    for p, need in enumerate(needs):
        for kernel, buffers in need.weights.items():
            for buffer in buffers:
                users[buffer].add(unit_of[p, kernel])
    sizes: dict[tuple[int, ...], int] = defaultdict(int)
    for buffer, who in users.items():
        sizes[tuple(sorted(who))] += trace.buffers[buffer].bytes
    return tuple(Resident(size=sizes[who], users=who) for who in sorted(sizes))
