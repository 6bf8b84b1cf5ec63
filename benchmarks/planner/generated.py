"""A generated graph: as many kernels as asked for, in layers that repeat, with a residual stream, branches, weights
and a state that one kernel of each layer appends to.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from tessera_core.plan.cluster import Cluster
from tessera_core.plan.problem import Family, Flow, Problem, Resident, Unit
from tessera_core.program.ir import Kernel, Program

LAYER = 25
"""Kernels of a layer."""
RATES: dict[str, tuple[float, float]] = {
    "a100-80gb": (1.6e6, 250e6),
    "l40s": (0.7e6, 280e6),
    "h100-sxm": (2.7e6, 700e6),
    "b200-sxm": (6.5e6, 1500e6),
}
"""Bytes and floating-point operations per microsecond, round figures."""
FLOOR_US = 2.0
OVERHEAD_US = 5.0
LARGE, SMALL, CACHE_BYTES = 1_000_000, 100_000, 8_000_000
"""Bytes of a kernel's output, of the largest and the smallest, and of a layer's state."""


def generated(kernels: int, cluster: Cluster, slots: int, seed: int = 0) -> Problem:
    """A problem of ``kernels`` kernels; the same for the same arguments.

    A kernel reads weights (bound by memory), computes on what it reads (bound by tensor cores) or hardly does either
    (bound by its launch); layers are alike, and their times differ by a tenth, as measured ones do.
    """
    draw = random.Random(seed)
    types = [device.type for device in cluster.devices]
    layer = [_kind(draw) for _ in range(LAYER)]
    units, flows, families, weights = [], [], [], []
    for index in range(kernels):
        number, at = divmod(index, LAYER)
        size, weight_bytes, flops = layer[at]
        writer = at == LAYER // 2 - 1 and index + 1 < kernels
        jitter = draw.uniform(0.9, 1.1)
        units.append(
            Unit(
                kernels=((0, index),),
                replicable=writer,
                times=(tuple(jitter * _time_us(weight_bytes + 2 * size, flops, kind) for kind in types),),
            )
        )
        if weight_bytes:
            weights.append(Resident(size=weight_bytes, users=(index,)))
        if writer:
            families.append(
                Family(name=f"cache.{number}", size=CACHE_BYTES, units=(index, index + 1), writers=(index,))
            )
        elif index + 1 < kernels:
            flows.append(_flow(index, size, _consumers(draw, index, kernels)))
    program = Program(
        id=0,
        name="generated",
        phase="decode",
        batch=1,
        context=1,
        ops=(),
        kernels=tuple(_kernel(index) for index in range(kernels)),
        io=(),
        guards=(),
    )
    place = {device.name: index for index, device in enumerate(cluster.devices)}
    return Problem(
        programs=(program,),
        rates=(1,),
        slots=slots,
        devices=cluster.devices,
        links={(place[a], place[b]): link for (a, b), link in cluster.links.items()},
        overheads=tuple(OVERHEAD_US for _ in types),
        domains=tuple((size, (place[name],)) for name, size in cluster.domains.items()),
        units=tuple(units),
        flows=tuple(flows),
        families=tuple(families),
        weights=tuple(weights),
        activations=(Resident(size=LARGE, users=tuple(range(kernels))),),
        paths=(_longest(units, flows),),
    )


def _kind(draw: random.Random) -> tuple[int, int, float]:
    """Output bytes, weight bytes and operations of a kernel of the layer."""
    size = draw.choice((SMALL, LARGE // 4, LARGE))
    bound = draw.choice(("memory", "compute", "launch"))
    if bound == "memory":
        return size, round(draw.uniform(5e6, 60e6)), 1e8
    if bound == "compute":
        return size, 0, draw.uniform(1e9, 2e10)
    return size, 0, 1e6


def _time_us(moved_bytes: float, flops: float, kind: str) -> float:
    bytes_per_us, flops_per_us = RATES[kind]
    return max(FLOOR_US, moved_bytes / bytes_per_us, flops / flops_per_us)


def _consumers(draw: random.Random, index: int, kernels: int) -> tuple[int, ...]:
    """The next kernel; now and then one further on in the layer, or the next layer's first: the residual stream."""
    found = {index + 1}
    if draw.random() < 0.3:
        found.add(min(index + draw.randint(2, 6), kernels - 1))
    if index % LAYER == 0 and index + LAYER < kernels:
        found.add(index + LAYER)
    return tuple(sorted(found))


def _flow(index: int, size: int, consumers: Sequence[int]) -> Flow:
    return Flow(
        program=0,
        kernel=index,
        producer=index,
        buffer=index,
        size=size,
        boxes=None,
        consumers=tuple(consumers),
        feeds=False,
    )


def _kernel(index: int) -> Kernel:
    return Kernel(
        id=index,
        signature=f"kernel.{index % LAYER}",
        name=f"kernel.{index % LAYER}",
        kind="generated",
        flops=0,
        read_bytes=0,
        written_bytes=0,
        state_writer="copy" if index % LAYER == LAYER // 2 - 1 else "none",
        dtype="bfloat16",
        layer=index // LAYER,
        ops=(),
    )


def _longest(units: Sequence[Unit], flows: Sequence[Flow]) -> tuple[int, ...]:
    """The path from the first kernel to the last that takes longest: every iteration waits for the one before."""
    best = [0.0] * len(units)
    before = [-1] * len(units)
    for flow in flows:
        reached = best[flow.producer] + sum(units[flow.producer].times[0])
        for unit in flow.consumers:
            if reached > best[unit]:
                best[unit], before[unit] = reached, flow.producer
    path, at = [], len(units) - 1
    while at >= 0:
        if not units[at].replicable:
            path.append(at)
        at = before[at]
    return tuple(reversed(path))
