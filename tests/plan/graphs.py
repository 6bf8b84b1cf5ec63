"""Small traces, deps, times and clusters built by hand, and a plan of any placement of their kernels."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from tessera_core.deps.graph import Access, Deps, Edge
from tessera_core.plan.cluster import Cluster, Device, Link
from tessera_core.plan.ir import Assignment, Home, Plan, PlanDevice, Route, Transfer
from tessera_core.plan.predict import Origin
from tessera_core.profile.times import DeviceRow, TimeRow, Times
from tessera_core.program.boxes import Box
from tessera_core.program.ir import Buffer, IoBinding, Kernel, Op, Operand, Program, State, TensorRef, Trace

DIGEST = "sha256:graph"


class Graph:
    """Builds a trace and its deps together: kernels read and write whole buffers."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.tensors: list[TensorRef] = []
        self.programs: list[Program] = []
        self.families: list[str] = []
        self.accesses: dict[int, list[Access]] = {}
        self.edges: dict[int, list[Edge]] = {}
        self.chains: dict[int, tuple[tuple[int, ...], ...]] = {}

    def buffer(self, kind: Any, size: int, *, shared: bool = False, name: str = "") -> int:
        number = len(self.buffers)
        owner = None if shared else len(self.programs)
        self.buffers.append(
            Buffer(id=number, program=owner, kind=kind, bytes=size, name=name or f"b{number}", real=True)
        )
        self.tensors.append(
            TensorRef(id=number, buffer=number, dtype="uint8", shape=(size,), stride=(1,), offset=0)
        )
        return number

    def weight(self, size: int) -> int:
        return self.buffer("weight", size, shared=True)

    def program(
        self,
        kernels: Sequence[Mapping[str, Any]],
        *,
        phase: str = "decode",
        batch: int = 1,
        inputs: Mapping[str, int] | None = None,
        outputs: Mapping[str, tuple[int, str | None]] | None = None,
        state: Mapping[str, int] | None = None,
        chains: tuple[tuple[int, ...], ...] = (),
    ) -> Program:
        """``kernels``: reads, writes (buffers), signature, writer. Buffers must be made just before."""
        number = len(self.programs)
        made: list[Kernel] = []
        ops: list[Op] = []
        accesses: list[Access] = []
        edges: list[Edge] = []
        last: dict[int, int] = {}
        for index, row in enumerate(kernels):
            reads, writes = row.get("reads", ()), row.get("writes", ())
            operands = []
            for mode, which in (("read", reads), ("write", writes)):
                for buffer in which:
                    accesses.append(self._access(number, index, buffer, mode))
                    operands.append(
                        Operand(
                            tensor=buffer,
                            mode=mode,
                            must=mode == "write",
                            valid_for="shapes",
                            evidence="schema",
                            boxes=None,
                        )
                    )
            for buffer in reads:
                if buffer in last:
                    edges.append(self._edge(number, last[buffer], index, buffer))
            last.update(dict.fromkeys(writes, index))
            ops.append(
                Op(
                    id=index,
                    kernel=index,
                    target="aten.add.Tensor",
                    schema="",
                    arguments={"args": [], "kwargs": {}},
                    inputs=tuple(reads),
                    outputs=tuple(writes),
                    operands=tuple(operands),
                )
            )
            made.append(
                Kernel(
                    id=index,
                    signature=row.get("signature", f"s{number}.{index}"),
                    name=f"k{index}",
                    kind=row.get("kind", "other"),
                    flops=0,
                    read_bytes=0,
                    written_bytes=0,
                    state_writer=row.get("writer", "none"),
                    dtype="float32",
                    layer=row.get("layer"),
                    ops=(index,),
                )
            )
        io = [IoBinding(role="input", name=n, tensor=b, feeds=None) for n, b in (inputs or {}).items()]
        io += [IoBinding(role="output", name=n, tensor=b, feeds=f) for n, (b, f) in (outputs or {}).items()]
        io += [IoBinding(role="state", name=n, tensor=b, feeds=None) for n, b in (state or {}).items()]
        self.families += [name for name in state or {} if name not in self.families]
        program = Program(
            id=number,
            name=f"{phase}:batch={batch},context=8",
            phase=phase,
            batch=batch,
            context=8,
            ops=tuple(ops),
            kernels=tuple(made),
            io=tuple(io),
            guards=(),
        )
        self.programs.append(program)
        self.accesses[number], self.edges[number], self.chains[number] = accesses, edges, chains
        return program

    def trace(self) -> Trace:
        return Trace(
            info={"program_digest": DIGEST},
            programs=tuple(self.programs),
            buffers=tuple(self.buffers),
            tensors=tuple(self.tensors),
            weights=(),
            states=tuple(State(name=n, batch_axis=0, sequence_axis=None, init={}) for n in self.families),
            constants=b"",
        )

    def deps(self) -> Deps:
        return Deps(
            digest="sha256:deps",
            program_digest=DIGEST,
            targets=("ops",),
            accesses_of={number: tuple(rows) for number, rows in self.accesses.items()},
            edges_of={number: tuple(rows) for number, rows in self.edges.items()},
            chains_of=self.chains,
        )

    def _access(self, program: int, kernel: int, buffer: int, mode: Any) -> Access:
        return Access(
            program=program,
            kernel=kernel,
            buffer=buffer,
            mode=mode,
            must=mode == "write",
            boxes=(Box.interval(0, self.buffers[buffer].bytes),),
            evidence="schema",
            precision="exact",
        )

    def _edge(self, program: int, source: int, destination: int, buffer: int) -> Edge:
        return Edge(
            program=program,
            source=source,
            destination=destination,
            buffer=buffer,
            hazard="RAW",
            boxes=(Box.interval(0, self.buffers[buffer].bytes),),
            must=True,
            evidence="schema",
        )


def times_of(
    trace: Trace,
    types: Mapping[str, float],
    spread: float = 1.0,
    us: Mapping[tuple[str, str], float] | None = None,
    source: Any = "modelled",
) -> Times:
    """Every signature takes ``us[signature, type]``, or else the type's figure; interval: times/over ``spread``.

    ``types``: device type -> microseconds of an unlisted kernel. Segments cost 1 us beside their kernels.
    """
    signatures = sorted({k.signature for program in trace.programs for k in program.kernels})
    rows = {}
    for signature in signatures:
        for kind, usual in types.items():
            median = (us or {}).get((signature, kind), usual)
            row = TimeRow(
                signature=signature,
                part="whole",
                device_type=kind,
                condition="alone",
                cache="sequence",
                median_us=median,
                p10_us=median,
                p90_us=median,
                low_us=median / spread,
                high_us=median * spread,
                samples=0,
                flops=0,
                bytes=0,
                source=source,
                dtype="bfloat16",
                hardware="",
                dated="2026-12-01",
                detail="",
            )
            rows[signature, "whole", kind] = (row,)
    devices = {
        kind: DeviceRow(device_type=kind, hardware="", threads=0, overhead_us=1.0, date="", source="modelled")
        for kind in types
    }
    return Times(program_digest=DIGEST, digest="sha256:times", rows=rows, links={}, devices=devices)


def cluster_of(
    types: Sequence[str],
    capacity: int | Sequence[int] = 10**12,
    *,
    latency_us: float = 2.0,
    gbit_per_s: float = 8.0,
    send_us: float = 0.0,
    receive_us: float = 0.0,
    occupies_sender: bool = False,
    domain: str | None = None,
) -> Cluster:
    """Devices d0, d1, ...; at 8 Gbit/s a kilobyte takes one microsecond."""
    sizes = [capacity] * len(types) if isinstance(capacity, int) else list(capacity)
    devices = tuple(
        Device(
            name=f"d{i}", type=kind, capacity_bytes=size, memory_domain=domain or f"d{i}", price_per_hour=None
        )
        for i, (kind, size) in enumerate(zip(types, sizes, strict=True))
    )
    link = Link(
        latency_us=latency_us,
        gbit_per_s=gbit_per_s,
        send_us=send_us,
        receive_us=receive_us,
        occupies_sender=occupies_sender,
    )
    domains: dict[str, int] = {}
    for device in devices:
        domains[device.memory_domain] = max(domains.get(device.memory_domain, 0), device.capacity_bytes)
    return Cluster(
        devices=devices,
        links={(a.name, b.name): link for a in devices for b in devices if a.name != b.name},
        domains=domains,
        digest="sha256:cluster",
    )


def origin_of(graph: Graph, times: Times, cluster: Cluster, policy: str = "throughput") -> Origin:
    names = ("program_digest", "deps_digest", "profile_digest", "cluster_digest")
    return Origin(
        trace=graph.trace(),
        deps=graph.deps(),
        times=times,
        cluster=cluster,
        policy=policy,
        digests=dict.fromkeys(names, DIGEST),
        targets=("ops",),
    )


def plan_of(
    origin: Origin,
    programs: Sequence[Program],
    rates: Sequence[int],
    slots: int,
    where: Mapping[tuple[int, int], Iterable[str]],
) -> Plan:
    """The plan of one route with kernel (position, id) on the devices ``where`` says, without predictions.

    Ships what RAW edges and feeding outputs need, from the first device of the producer, and takes the homes
    that the kernels imply. On two devices there is only one device to ship from.
    """
    trace, cluster, times = origin.trace, origin.cluster, origin.times
    spots = {key: tuple(devices) for key, devices in where.items()}
    homes: set[tuple[str, str]] = set()
    transfers: list[Transfer] = []
    for position, program in enumerate(programs):
        following = min(position + 1, len(programs) - 1)
        bound = {b.tensor: b.name for b in program.io if b.role == "state"}
        wanted: set[tuple[int, int, str]] = set()
        for edge in origin.deps.edges(program.id):
            if trace.buffers[edge.buffer].kind != "state":
                for device in spots[position, edge.destination]:
                    wanted.add((edge.source, edge.buffer, device))
        inputs = {b.name: b.tensor for b in programs[following].io if b.role == "input"}
        for binding in program.io:
            if binding.role == "output" and binding.feeds in inputs:
                writer = max(k.id for k in program.kernels if binding.tensor in program.ops[k.id].outputs)
                for kernel in programs[following].kernels:
                    if inputs[binding.feeds] in programs[following].ops[kernel.id].inputs:
                        for device in spots[following, kernel.id]:
                            wanted.add((writer, binding.tensor, device))
        order = count()
        for producer, buffer, device in sorted(wanted):
            if device not in spots[position, producer]:
                size = trace.buffers[buffer].bytes
                link = cluster.links[spots[position, producer][0], device]
                transfers.append(
                    Transfer(
                        route=0,
                        program=program.name,
                        order=next(order),
                        buffer=buffer,
                        producer=producer,
                        source=spots[position, producer][0],
                        destination=device,
                        bytes=size,
                        boxes=None,
                        combine="copy",
                        time_us=link.latency_us + link.wire_us(size),
                    )
                )
        for access in origin.deps.accesses(program.id):
            if access.buffer in bound:
                homes |= {(bound[access.buffer], device) for device in spots[position, access.kernel]}
    return Plan(
        devices=tuple(
            PlanDevice(
                name=d.name, type=d.type, capacity_bytes=d.capacity_bytes, memory_domain=d.memory_domain
            )
            for d in cluster.devices
        ),
        routes=(
            Route(
                route=0,
                share=1.0,
                batch=programs[-1].batch,
                slots=slots,
                programs=tuple(p.name for p in programs),
                rates=tuple(rates),
            ),
        ),
        assignments=tuple(
            Assignment(
                route=0,
                program=programs[p].name,
                kernel=k,
                part="whole",
                device=device,
                time_us=times.time(
                    programs[p].kernels[k].signature, cluster.device(device).type, "beside"
                ).median_us,
            )
            for (p, k), devices in sorted(spots.items())
            for device in devices
        ),
        transfers=tuple(transfers),
        homes=tuple(Home(route=0, state=name, device=device) for name, device in sorted(homes)),
        facts={
            "policy": origin.policy,
            "link": [
                {"source": a, "destination": b, **{n: getattr(link, n) for n in link.__slots__}}
                for (a, b), link in cluster.links.items()
            ],
            "overhead": [
                {"device": d.name, "overhead_us": times.overhead_us(d.type)} for d in cluster.devices
            ],
        },
    )
