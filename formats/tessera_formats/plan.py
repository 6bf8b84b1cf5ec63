"""The plan artifact (TOML): routes, assignments, transfers, order, memory, predictions and every baseline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tessera_formats.document import DocumentSchema, Field, Record, read_document, write_document
from tessera_formats.profile import CONDITIONS

STRATEGIES = (
    "auto",
    "placement",
    "split",
    "data-parallel",
    "pipeline",
    "prefill-decode",
    "attention-ffn",
    "single",
)
POLICIES = ("throughput", "latency")

_BOX = Record(
    (
        Field(name="start", type="integer", meaning="first byte", minimum=0),
        Field(name="counts", type="integers", meaning="extents", minimum=1),
        Field(name="strides", type="integers", meaning="strides in bytes", minimum=1),
        Field(name="run", type="integer", meaning="contiguous bytes", minimum=1),
    )
)
_DEVICE = Record(
    (
        Field(name="name", type="string", meaning="device of the cluster"),
        Field(name="type", type="string", meaning="device type"),
        Field(name="capacity_bytes", type="integer", meaning="usable memory", minimum=0),
        Field(name="memory_domain", type="string", meaning="devices that share it share memory"),
    )
)
_ROUTE = Record(
    (
        Field(name="route", type="integer", meaning="id, dense", minimum=0),
        Field(name="share", type="number", meaning="share of the requests that follow it", minimum=0),
        Field(
            name="batch",
            type="integer",
            meaning="requests in a batch (of the last phase's program)",
            minimum=1,
        ),
        Field(name="slots", type="integer", meaning="batches in flight (N)", minimum=1, maximum=65536),
        Field(name="programs", type="strings", meaning="program names that it uses, in phase order"),
        Field(
            name="rates",
            type="integers",
            meaning="iterations of each program per batch of requests",
            minimum=0,
        ),
    )
)
_ASSIGNMENT = Record(
    (
        Field(name="route", type="integer", meaning="route", minimum=0),
        Field(name="program", type="string", meaning="program name"),
        Field(name="kernel", type="integer", meaning="kernel", minimum=0),
        Field(name="part", type="string", meaning="whole, or a share of a split kernel"),
        Field(name="device", type="string", meaning="device; a state writer may have several rows"),
        Field(name="time_us", type="number", meaning="time used in planning", minimum=0),
    )
)
_TRANSFER = Record(
    (
        Field(name="route", type="integer", meaning="route", minimum=0),
        Field(name="program", type="string", meaning="program name"),
        Field(
            name="order", type="integer", meaning="position in the communicator's order per slot", minimum=0
        ),
        Field(name="buffer", type="integer", meaning="buffer that is shipped", minimum=0),
        Field(name="part", type="string", meaning="whole, or a share of a split producer"),
        Field(
            name="producer",
            type="integer",
            meaning="kernel that wrote it; -1: the program's input",
            minimum=-1,
        ),
        Field(name="source", type="string", meaning="sending device"),
        Field(name="destination", type="string", meaning="receiving device"),
        Field(name="bytes", type="integer", meaning="bytes on the wire", minimum=0),
        Field(
            name="boxes",
            type="records",
            meaning="bytes of the buffer; absent: whole",
            required=False,
            inner=_BOX,
        ),
        Field(name="combine", type="string", meaning="how it lands", choices=("copy", "add")),
        Field(name="time_us", type="number", meaning="time used in planning", minimum=0),
    )
)
_HOME = Record(
    (
        Field(name="route", type="integer", meaning="route", minimum=0),
        Field(name="state", type="string", meaning="state family"),
        Field(name="device", type="string", meaning="a device on which it lives"),
    )
)
_MEMORY = Record(
    (
        Field(name="device", type="string", meaning="device"),
        Field(name="weight_bytes", type="integer", meaning="weights and constants", minimum=0),
        Field(name="state_bytes", type="integer", meaning="state of all slots", minimum=0),
        Field(
            name="activation_bytes",
            type="integer",
            meaning="activations, inputs and receive buffers of all slots",
            minimum=0,
        ),
        Field(name="capacity_bytes", type="integer", meaning="usable memory", minimum=0),
    )
)
_INTERVAL = Record(
    (
        Field(name="route", type="integer", meaning="route", minimum=0),
        Field(name="program", type="string", meaning="program name"),
        Field(
            name="resource_us",
            type="number",
            meaning="busiest resource's least time per iteration",
            minimum=0,
        ),
        Field(
            name="latency_us",
            type="number",
            meaning="one iteration alone, to its end and its successor's start",
            minimum=0,
        ),
        Field(name="interval_us", type="number", meaning="bound: no pipeline is faster", minimum=0),
        Field(
            name="simulated_us", type="number", meaning="interval between iterations in simulation", minimum=0
        ),
    )
)
_CYCLE = Record(
    (
        Field(name="route", type="integer", meaning="route", minimum=0),
        Field(
            name="resource_us",
            type="number",
            meaning="busiest resource's least time per batch of requests, all programs together",
            minimum=0,
        ),
        Field(
            name="latency_us",
            type="number",
            meaning="a batch alone, until its slot takes the next",
            minimum=0,
        ),
        Field(name="interval_us", type="number", meaning="bound: no pipeline is faster", minimum=0),
        Field(
            name="simulated_us", type="number", meaning="interval between batches in simulation", minimum=0
        ),
        Field(
            name="token_us", type="number", meaning="time between a request's tokens in simulation", minimum=0
        ),
    )
)
_PREDICTION = Record(
    (
        Field(
            name="objective_us",
            type="number",
            meaning="interval of the cycle (or latency of a batch) that was minimised",
            minimum=0,
        ),
        Field(
            name="lower_bound_us",
            type="number",
            meaning="no plan of this strategy is below it in this cost model",
            minimum=0,
        ),
        Field(name="gap", type="number", meaning="objective / lower bound - 1", minimum=0),
        Field(
            name="tokens_per_s",
            type="number",
            meaning="generated tokens (or batches' requests) a second",
            minimum=0,
        ),
        Field(name="time_per_token_us", type="number", meaning="time between a request's tokens", minimum=0),
        Field(name="measured_share", type="number", meaning="share of kernel time measured", minimum=0),
        Field(name="silicon_share", type="number", meaning="share from silicon tables", minimum=0),
        Field(name="modelled_share", type="number", meaning="share modelled", minimum=0),
        Field(
            name="probability_best",
            type="number",
            meaning="of beating the best baseline over paired draws",
            minimum=0,
        ),
        Field(name="intervals", type="records", meaning="per route and program", inner=_INTERVAL),
        Field(
            name="cycles",
            type="records",
            meaning="per route, of a batch of requests; absent: programs take turns",
            required=False,
            inner=_CYCLE,
        ),
    )
)
_LINK = Record(
    (
        Field(name="source", type="string", meaning="sending device"),
        Field(name="destination", type="string", meaning="receiving device"),
        Field(name="latency_us", type="number", meaning="time of an empty transfer", minimum=0),
        Field(name="gbit_per_s", type="number", meaning="rate of large transfers", minimum=0.001),
        Field(name="send_us", type="number", meaning="time the sender is busy beside the copy", minimum=0),
        Field(
            name="receive_us", type="number", meaning="time the receiver is busy beside the copy", minimum=0
        ),
        Field(name="occupies_sender", type="boolean", meaning="the sender computes nothing while it copies"),
    )
)
_OVERHEAD = Record(
    (
        Field(name="device", type="string", meaning="device"),
        Field(
            name="overhead_us",
            type="number",
            meaning="fixed time a segment costs beside its kernels",
            minimum=0,
        ),
    )
)
_COMPARED = Record(
    (
        Field(name="strategy", type="string", meaning="strategy", choices=STRATEGIES),
        Field(name="feasible", type="boolean", meaning="whether it has a plan"),
        Field(name="chosen", type="boolean", meaning="whether this plan is it"),
        Field(name="reason", type="string", meaning="why not feasible, or what it uses"),
        Field(name="batch", type="integer", meaning="requests in a batch", minimum=0),
        Field(name="slots", type="integer", meaning="batches in flight over all devices", minimum=0),
        Field(name="devices", type="integer", meaning="devices used", minimum=0),
        Field(
            name="interval_us",
            type="number",
            meaning="interval between decode (or only) iterations",
            minimum=0,
        ),
        Field(name="latency_us", type="number", meaning="one iteration alone", minimum=0),
        Field(name="tokens_per_s", type="number", meaning="tokens (or requests) a second", minimum=0),
        Field(name="time_per_token_us", type="number", meaning="time between a request's tokens", minimum=0),
        Field(name="measured_share", type="number", meaning="share of kernel time measured", minimum=0),
        Field(name="silicon_share", type="number", meaning="share from silicon tables", minimum=0),
        Field(name="modelled_share", type="number", meaning="share of kernel time modelled", minimum=0),
        Field(name="probability_best", type="number", meaning="of beating the best baseline", minimum=0),
    )
)
PLAN_VERSIONS = {
    1: DocumentSchema(
        kind="plan",
        version=1,
        record=Record(
            (
                Field(name="program_digest", type="string", meaning="digest of the trace's programs"),
                Field(name="deps_digest", type="string", meaning="digest of the deps used"),
                Field(name="profile_digest", type="string", meaning="digest of the profiles used"),
                Field(name="cluster_digest", type="string", meaning="digest of the cluster used"),
                Field(name="policy", type="string", meaning="what is minimised", choices=POLICIES),
                Field(name="strategy", type="string", meaning="strategy of this plan", choices=STRATEGIES),
                Field(name="requested", type="string", meaning="strategy asked for", choices=STRATEGIES),
                Field(
                    name="condition",
                    type="string",
                    meaning="profile condition used",
                    choices=CONDITIONS,
                ),
                Field(name="targets", type="strings", meaning="targets whose hazards were united"),
                Field(name="device", type="records", meaning="devices", inner=_DEVICE),
                Field(name="route", type="records", meaning="routes", inner=_ROUTE),
                Field(name="prediction", type="record", meaning="what to expect", inner=_PREDICTION),
                Field(name="compared", type="records", meaning="every strategy's numbers", inner=_COMPARED),
                Field(name="memory", type="records", meaning="memory per device", inner=_MEMORY),
                Field(name="home", type="records", meaning="homes of state", inner=_HOME),
                Field(name="assignment", type="records", meaning="kernel to device", inner=_ASSIGNMENT),
                Field(name="transfer", type="records", meaning="what crosses", inner=_TRANSFER),
                Field(
                    name="link",
                    type="records",
                    meaning="links used in planning; absent: a transfer's time is all of its link",
                    required=False,
                    inner=_LINK,
                ),
                Field(
                    name="overhead",
                    type="records",
                    meaning="segment overheads used in planning; absent: none",
                    required=False,
                    inner=_OVERHEAD,
                ),
            )
        ),
    )
}
PLAN = PLAN_VERSIONS[1]


def read_plan(path: Path | str) -> dict[str, Any]:
    """Open a plan (``-``: standard input)."""
    return read_document(path, PLAN_VERSIONS)


def write_plan(path: Path | str, plan: Mapping[str, Any]) -> None:
    """Write a plan (``-``: standard output)."""
    write_document(path, PLAN, plan)
