"""The cluster artifact (TOML, written by hand or by ``tessera probe``): devices, their types, and their links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from tessera_formats.document import (
    DocumentSchema,
    Field,
    Record,
    check_record,
    document_checksum,
    read_document,
)
from tessera_formats.files import STANDARD_STREAM, check_output_file, replace_file

_DEVICE = Record(
    (
        Field(name="name", type="string", meaning="how plans call it"),
        Field(name="type", type="string", meaning="device type, e.g. a100-80gb"),
        Field(
            name="count",
            type="integer",
            meaning="gives NAME.0, NAME.1, ...",
            required=False,
            minimum=1,
            maximum=4096,
        ),
        Field(
            name="memory_gb",
            type="number",
            meaning="usable memory, 1e9 bytes",
            required=False,
            minimum=0,
            maximum=1e6,
        ),
        Field(name="memory_domain", type="string", meaning="devices that share one memory", required=False),
        Field(name="price_per_hour", type="number", meaning="USD", required=False, minimum=0),
        Field(name="host", type="string", meaning="machine that holds it", required=False),
        Field(name="hardware", type="string", meaning="there, as bindings call it: cuda:0", required=False),
    )
)
_LINK = Record(
    (
        Field(name="between", type="strings", meaning="two devices or types, both ways", required=False),
        Field(name="from", type="string", meaning="sending device or type", required=False),
        Field(name="to", type="string", meaning="receiving device or type", required=False),
        Field(name="gbit_per_s", type="number", meaning="rate", minimum=0.001, maximum=1e9),
        Field(name="latency_us", type="number", meaning="time of an empty transfer", minimum=0, maximum=1e9),
        Field(
            name="send_us",
            type="number",
            meaning="time the sender is busy beside the copy; default 0",
            required=False,
            minimum=0,
            maximum=1e9,
        ),
        Field(
            name="receive_us",
            type="number",
            meaning="time the receiver is busy beside the copy; default 0",
            required=False,
            minimum=0,
            maximum=1e9,
        ),
        Field(
            name="occupies_sender",
            type="boolean",
            meaning="the sender computes nothing while it copies; default false",
            required=False,
        ),
        Field(name="transport", type="string", meaning="how the bytes move", required=False),
        Field(name="measured", type="string", meaning="when (UTC, ISO 8601); absent: stated", required=False),
        Field(name="residual", type="number", meaning="median error of the line", required=False, minimum=0),
    )
)
CLUSTER_VERSIONS = {
    1: DocumentSchema(
        kind="cluster",
        version=1,
        kind_optional=True,
        record=Record(
            (
                Field(name="device", type="records", meaning="devices", inner=_DEVICE),
                Field(name="link", type="records", meaning="links", required=False, inner=_LINK),
            )
        ),
    )
}
CLUSTER = CLUSTER_VERSIONS[1]


def read_cluster(path: Path | str) -> dict[str, Any]:
    """Open a cluster file (``-``: standard input)."""
    return read_document(path, CLUSTER_VERSIONS)


def write_cluster(path: Path | str, cluster: Mapping[str, Any], comments: Sequence[str] = ()) -> None:
    """Check and write a cluster file as a person would (``-``: standard output), ``comments`` above the devices.

    Every device and link is a table of its own, so that single lines can be changed by hand.
    """
    check_record(cluster, CLUSTER.record, str(path))
    head = {"kind": CLUSTER.kind, "version": CLUSTER.version, "checksum": cluster_digest(dict(cluster))}
    parts = [tomli_w.dumps(head), *(f"# {line}".rstrip() for line in comments)]
    parts += [f"\n[[{name}]]\n{tomli_w.dumps(row)}".rstrip() for name in cluster for row in cluster[name]]
    if str(path) != STANDARD_STREAM:
        check_output_file(Path(path), CLUSTER.kind)
    replace_file(path, "\n".join([*parts, ""]).encode())


def cluster_digest(cluster: dict[str, Any]) -> str:
    """Digest of a cluster's content."""
    return document_checksum(cluster)
