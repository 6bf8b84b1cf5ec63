"""Times of collectives, which are always modelled: a kernel measured on one device never meets the other ranks.

A ring takes 2(N - 1) steps for an all-reduce, in which each rank sends 2(N - 1)/N of the payload, and N - 1 steps for
an all-gather, each as long as its largest part (Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH", 2005, section 4). The ranks are devices of one type in one host.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessera_core.devices.modelled import ModelledDevice
from tessera_core.profile.model.roofline import ModelledTime, interval_factor
from tessera_core.program.ir import Op, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """What one collective does on each rank: ``steps`` of the ring, and the bytes that it sends in all of them."""

    name: str
    ranks: int
    steps: int
    sent_bytes: int


def collectives(trace: Trace) -> dict[str, Collective]:
    """The collectives of a trace, by their kernels' signature."""
    found: dict[str, Collective] = {}
    for program in trace.programs:
        for kernel in program.kernels:
            if kernel.kind == "collective" and kernel.signature not in found:
                found[kernel.signature] = _collective(trace, program.ops[kernel.ops[-1]])
    return found


def _collective(trace: Trace, op: Op) -> Collective:
    part = trace.tensors[op.inputs[0]]
    size = part.elements * part.item_bytes
    if op.target.startswith("tessera.all_reduce."):
        ranks = int(op.arguments["args"][1])
        return Collective(
            name="all-reduce", ranks=ranks, steps=2 * (ranks - 1), sent_bytes=2 * (ranks - 1) * size // ranks
        )
    extents = [int(extent) for extent in op.arguments["args"][1]]
    largest = size // part.shape[-1] * max(extents)
    steps = len(extents) - 1
    return Collective(name="all-gather", ranks=len(extents), steps=steps, sent_bytes=steps * largest)


def collective_time(work: Collective, device: ModelledDevice) -> ModelledTime:
    """The time of a collective between devices of one type, over NVLink, else PCIe, else their host's memory."""
    figures, kind = device.catalogue.collective, device.type
    if kind.peer_gbyte_per_s is not None:
        rate, error, path = kind.peer_gbyte_per_s * 1e9 * figures.peer_share, figures.peer_error, "NVLink"
    elif kind.host_gbyte_per_s is not None:
        rate, error, path = kind.host_gbyte_per_s * 1e9 * figures.host_share, figures.host_error, "PCIe"
    else:
        # One thread copies its part into shared memory, another copies it out.
        rate, error, path = device.memory().per_s / 2, figures.host_error, "memory of the host"
    time_us = figures.start_us + work.steps * figures.step_us + work.sent_bytes / rate * 1e6
    factor = interval_factor(error, 0.0)
    detail = f"{work.name} of {work.ranks} ranks: {work.sent_bytes:,} bytes in {work.steps} steps over {path}"
    return ModelledTime(time_us, time_us / factor, time_us * factor, detail)
