"""The profile artifact (one Arrow file): times of kernel signatures on device types, links and devices.

Every row says whether its time was measured, looked up in a silicon table, or modelled.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from tessera_formats.artifact import (
    TableArtifact,
    TableArtifactSchema,
    read_table_artifact,
    write_table_artifact,
)
from tessera_formats.document import Field, Record
from tessera_formats.table import Column, TableSchema

F64, I64, TEXT = pa.float64(), pa.int64(), pa.string()
SOURCES = ("measured", "silicon", "modelled")
CONDITIONS = ("alone", "beside", "copies")
"""alone: nothing else runs; beside: the other device works on the other half of the kernels, as in a placement;
copies: on the whole program, as in data parallelism. Slices of a GPU are measured alone and beside copies."""
CACHES = ("sequence", "warm", "cold")
"""sequence: as the kernel runs within whole iterations; warm: repeated alone; cold: caches flushed before."""

TRANSPORTS = ("device-memory", "peer-copy", "shared-memory", "pinned-host", "nccl", "gloo")
"""How bytes move between two devices. Where a pair was measured with several, the first of these that it has is the
one to plan with: it is the shortest way between devices of one host, and the one that the executor takes there. nccl
and gloo alone also reach another host."""

TIMES = TableSchema(
    name="times",
    meaning="one row per kernel signature, part, device type, condition and cache state",
    columns=(
        Column(name="signature", type=TEXT, meaning="kernel signature of the trace"),
        Column(name="part", type=TEXT, meaning="whole, or a share of a split kernel"),
        Column(name="device_type", type=TEXT, meaning="device type, e.g. a100-80gb"),
        Column(
            name="condition",
            type=TEXT,
            meaning="alone, beside the other devices' part of the work, or beside copies of it all",
            choices=CONDITIONS,
        ),
        Column(name="load", type=TEXT, meaning="what ran beside it, and where; empty: nothing"),
        Column(name="cache", type=TEXT, meaning="cache state before the kernel", choices=CACHES),
        Column(name="median_us", type=F64, meaning="median time", minimum=0),
        Column(name="p10_us", type=F64, meaning="10th percentile", minimum=0),
        Column(name="p90_us", type=F64, meaning="90th percentile", minimum=0),
        Column(
            name="low_us", type=F64, meaning="lower end of the 90% interval of the typical time", minimum=0
        ),
        Column(name="high_us", type=F64, meaning="upper end of the 90% interval", minimum=0),
        Column(name="samples", type=I64, meaning="timed runs; 0 where not measured", minimum=0),
        Column(name="flops", type=I64, meaning="floating-point operations", minimum=0),
        Column(name="bytes", type=I64, meaning="bytes moved at least", minimum=0),
        Column(name="dtype", type=TEXT, meaning="in which the kernel computes on this type"),
        Column(name="source", type=TEXT, meaning="where the time comes from", choices=SOURCES),
        Column(name="hardware", type=TEXT, meaning="what was measured; empty where modelled"),
        Column(
            name="dated", type=TEXT, meaning="when measured (UTC, ISO 8601), or the table's or model's date"
        ),
        Column(
            name="table", type=TEXT, meaning="package, version, framework and its version; empty: no table"
        ),
        Column(
            name="distance",
            type=F64,
            meaning="natural logarithm of the largest factor in size to the nearest measured point; 0: met",
            minimum=0,
        ),
        Column(name="detail", type=TEXT, meaning="how it was measured, read or modelled, in words"),
    ),
    key=("signature", "part", "device_type", "condition", "cache"),
)
_LINK = Record(
    (
        Field(name="source", type="string", meaning="sending device type"),
        Field(name="destination", type="string", meaning="receiving device type"),
        Field(name="latency_us", type="number", meaning="time of an empty transfer", minimum=0),
        Field(name="gbit_per_s", type="number", meaning="rate of large transfers", minimum=0),
        Field(name="send_us", type="number", meaning="time the sender is busy beside the copy", minimum=0),
        Field(
            name="receive_us", type="number", meaning="time the receiver is busy beside the copy", minimum=0
        ),
        Field(name="occupies_sender", type="boolean", meaning="the sender computes nothing while it copies"),
        Field(name="samples", type="integer", meaning="timed transfers", minimum=0),
        Field(name="residual", type="number", meaning="median relative error of the fit", minimum=0),
        Field(name="origin", type="string", meaning="where it comes from", choices=SOURCES),
        Field(name="transport", type="string", meaning="how the bytes move", choices=TRANSPORTS),
        Field(name="detail", type="string", meaning="median times and errors by size", required=False),
        Field(name="dated", type="string", meaning="when measured (UTC, ISO 8601)", required=False),
    )
)
_DEVICE = Record(
    (
        Field(name="device_type", type="string", meaning="device type"),
        Field(name="hardware", type="string", meaning="what it was measured on, or the catalogue's name"),
        Field(name="threads", type="integer", meaning="CPU threads used; 0: not a CPU", minimum=0),
        Field(
            name="overhead_us",
            type="number",
            meaning="fixed time a segment costs beside its kernels",
            minimum=0,
        ),
        Field(name="date", type="string", meaning="day of measurement or of the catalogue"),
        Field(name="source", type="string", meaning="measured or modelled", choices=SOURCES),
    )
)
HEADER = Record(
    (
        Field(name="program_digest", type="string", meaning="digest of the trace's programs"),
        Field(name="links", type="records", meaning="measured or modelled links", inner=_LINK),
        Field(name="devices", type="records", meaning="device types of the rows", inner=_DEVICE),
    )
)
PROFILE_VERSIONS = {1: TableArtifactSchema(kind="profile", version=1, header=HEADER, table=TIMES)}
PROFILE = PROFILE_VERSIONS[1]


def read_profile(path: Path | str) -> TableArtifact:
    """Open a profile (``-``: standard input)."""
    return read_table_artifact(path, PROFILE_VERSIONS)


def write_profile(path: Path | str, header: Mapping[str, Any], table: pa.Table) -> None:
    """Write a profile (``-``: standard output)."""
    write_table_artifact(path, PROFILE, header, table)
