"""The run artifact (a bundle): spans of work on devices, requests, generated tokens, and a summary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from tessera_formats.bundle import Bundle, BundleSchema, read_bundle, write_bundle
from tessera_formats.document import Field, Record
from tessera_formats.table import Column, TableSchema

F64, I32, I64, TEXT = pa.float64(), pa.int32(), pa.int64(), pa.string()

SPANS = TableSchema(
    name="spans",
    meaning="one row per piece of work on a device",
    columns=(
        Column(name="device", type=TEXT, meaning="device"),
        Column(
            name="kind", type=TEXT, meaning="what was done", choices=("compute", "send", "receive", "move")
        ),
        Column(name="route", type=I32, meaning="route", minimum=0),
        Column(name="slot", type=I32, meaning="slot", minimum=0),
        Column(name="batch", type=I32, meaning="batch of requests", minimum=0),
        Column(name="program", type=TEXT, meaning="program name"),
        Column(name="iteration", type=I32, meaning="iteration of the batch, 0 is the first", minimum=0),
        Column(name="segment", type=I32, meaning="segment on this device", minimum=0),
        Column(
            name="first_kernel",
            type=I32,
            meaning="first kernel; null for transfers",
            nullable=True,
            minimum=0,
        ),
        Column(
            name="last_kernel", type=I32, meaning="last kernel; null for transfers", nullable=True, minimum=0
        ),
        Column(name="bytes", type=I64, meaning="bytes moved; 0 for compute", minimum=0),
        Column(name="start_us", type=F64, meaning="begin, since the run's start", minimum=0),
        Column(name="end_us", type=F64, meaning="end", minimum=0),
    ),
)
REQUESTS = TableSchema(
    name="requests",
    meaning="one row per request",
    columns=(
        Column(name="request", type=I32, meaning="id", minimum=0),
        Column(name="route", type=I32, meaning="route that it followed", minimum=0),
        Column(name="batch", type=I32, meaning="batch", minimum=0),
        Column(name="slot", type=I32, meaning="slot", minimum=0),
        Column(name="status", type=TEXT, meaning="outcome", choices=("finished", "lost")),
        Column(name="tokens", type=I32, meaning="tokens generated", minimum=0),
        Column(name="arrival_us", type=F64, meaning="arrival, since the run's start", minimum=0),
        Column(name="first_token_us", type=F64, meaning="first token; null: none", nullable=True, minimum=0),
        Column(name="end_us", type=F64, meaning="last token; null: not finished", nullable=True, minimum=0),
    ),
    key=("request",),
)
OUTPUTS = TableSchema(
    name="outputs",
    meaning="one row per generated token (empty in simulation)",
    columns=(
        Column(name="request", type=I32, meaning="request", minimum=0),
        Column(name="position", type=I32, meaning="0 is the first generated token", minimum=0),
        Column(name="token", type=I64, meaning="token id"),
    ),
    key=("request", "position"),
)
_INTERVAL = Record(
    (
        Field(name="route", type="integer", meaning="route", minimum=0),
        Field(name="program", type="string", meaning="program name"),
        Field(name="interval_us", type="number", meaning="steady interval between iterations", minimum=0),
        Field(name="planned_us", type="number", meaning="the plan's simulated interval", minimum=0),
        Field(name="iterations", type="integer", meaning="iterations that the interval rests on", minimum=0),
    )
)
INFO = Record(
    (
        Field(name="program_digest", type="string", meaning="digest of the trace's programs"),
        Field(name="plan_digest", type="string", meaning="digest of the plan"),
        Field(name="backend", type="string", meaning="how it ran", choices=("cpu", "simulate")),
        Field(name="status", type="string", meaning="outcome", choices=("finished", "lost")),
        Field(name="lost", type="string", meaning="device that was lost, and how; empty: none"),
        Field(
            name="verified",
            type="string",
            meaning="comparison with the unpartitioned program",
            choices=("equal", "different", "not checked"),
        ),
        Field(name="duration_us", type="number", meaning="first arrival to last token", minimum=0),
        Field(
            name="tokens_per_s", type="number", meaning="generated tokens (or requests) a second", minimum=0
        ),
        Field(name="intervals", type="records", meaning="per route and program", inner=_INTERVAL),
        Field(name="machine", type="string", meaning="processor and threads; simulate: none"),
    )
)
RUN_VERSIONS = {
    1: BundleSchema(
        kind="run", version=1, info=INFO, tables=(SPANS, REQUESTS, OUTPUTS), files=("perfetto.json",)
    )
}
RUN = RUN_VERSIONS[1]


def read_run(path: Path | str) -> Bundle:
    """Open a run."""
    return read_bundle(path, RUN_VERSIONS)


def write_run(
    path: Path | str, info: Mapping[str, Any], tables: Mapping[str, pa.Table], files: Mapping[str, bytes]
) -> None:
    """Write a run."""
    write_bundle(path, RUN, info=info, tables=tables, files=files)
