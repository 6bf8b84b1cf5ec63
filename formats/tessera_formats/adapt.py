"""The adapt artifact (a bundle): monitoring windows, plan decisions, requests and a summary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from tessera_formats.bundle import Bundle, BundleSchema, read_bundle, write_bundle
from tessera_formats.document import Field, Record
from tessera_formats.table import Column, TableSchema

F64, I32, TEXT = pa.float64(), pa.int32(), pa.string()

WINDOWS = TableSchema(
    name="windows",
    meaning="one row per monitoring window",
    columns=(
        Column(name="window", type=I32, meaning="id, dense", minimum=0),
        Column(name="start_us", type=F64, meaning="begin", minimum=0),
        Column(name="end_us", type=F64, meaning="end", minimum=0),
        Column(name="plan", type=TEXT, meaning="plan in force for new requests"),
        Column(name="arrivals", type=I32, meaning="requests that arrived", minimum=0),
        Column(name="completions", type=I32, meaning="requests that ended", minimum=0),
        Column(name="queued", type=I32, meaning="requests waiting at the end", minimum=0),
        Column(name="running", type=I32, meaning="requests in flight at the end", minimum=0),
        Column(
            name="pressure",
            type=F64,
            meaning="offered load over the capacity of the plan in force",
            minimum=0,
        ),
        Column(
            name="mean_latency_us",
            type=F64,
            meaning="of requests that ended; null: none",
            nullable=True,
            minimum=0,
        ),
    ),
    key=("window",),
)
DECISIONS = TableSchema(
    name="decisions",
    meaning="one row per change of the plan in force",
    columns=(
        Column(name="decision", type=I32, meaning="id, dense", minimum=0),
        Column(name="window", type=I32, meaning="window whose end triggered it", minimum=0),
        Column(name="at_us", type=F64, meaning="time", minimum=0),
        Column(name="before", type=TEXT, meaning="plan before"),
        Column(name="after", type=TEXT, meaning="plan after"),
        Column(name="pressure", type=F64, meaning="pressure that triggered it", minimum=0),
        Column(name="reason", type=TEXT, meaning="rule that fired"),
    ),
    key=("decision",),
)
REQUESTS = TableSchema(
    name="requests",
    meaning="one row per request",
    columns=(
        Column(name="request", type=I32, meaning="id", minimum=0),
        Column(name="plan", type=TEXT, meaning="plan that it started on, and stays on"),
        Column(name="arrival_us", type=F64, meaning="arrival", minimum=0),
        Column(name="start_us", type=F64, meaning="first work", minimum=0),
        Column(name="first_token_us", type=F64, meaning="first token", minimum=0),
        Column(name="end_us", type=F64, meaning="end", minimum=0),
        Column(name="tokens", type=I32, meaning="tokens generated", minimum=0),
    ),
    key=("request",),
)
_STATIC = Record(
    (
        Field(name="plan", type="string", meaning="plan held throughout, or 'adaptive'"),
        Field(name="mean_latency_us", type="number", meaning="mean over requests", minimum=0),
        Field(name="p95_latency_us", type="number", meaning="95th percentile", minimum=0),
        Field(name="tokens_per_s", type="number", meaning="tokens a second", minimum=0),
    )
)
INFO = Record(
    (
        Field(name="program_digest", type="string", meaning="digest of the trace's programs"),
        Field(name="plans", type="strings", meaning="plans, latency-minded first"),
        Field(name="window_us", type="number", meaning="length of a window", minimum=0),
        Field(name="threshold", type="number", meaning="pressure at which the plan changes", minimum=0),
        Field(name="compared", type="records", meaning="adaptive and each plan alone", inner=_STATIC),
    )
)
ADAPT_VERSIONS = {1: BundleSchema(kind="adapt", version=1, info=INFO, tables=(WINDOWS, DECISIONS, REQUESTS))}
ADAPT = ADAPT_VERSIONS[1]


def read_adapt(path: Path | str) -> Bundle:
    """Open an adapt bundle."""
    return read_bundle(path, ADAPT_VERSIONS)


def write_adapt(path: Path | str, info: Mapping[str, Any], tables: Mapping[str, pa.Table]) -> None:
    """Write an adapt bundle."""
    write_bundle(path, ADAPT, info=info, tables=tables)
