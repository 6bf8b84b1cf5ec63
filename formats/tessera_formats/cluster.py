"""The cluster artifact (TOML, usually written by hand): devices, their types, and the links between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera_formats.document import DocumentSchema, Field, Record, document_checksum, read_document

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
    )
)
_LINK = Record(
    (
        Field(name="between", type="strings", meaning="two devices or types, both ways", required=False),
        Field(name="from", type="string", meaning="sending device or type", required=False),
        Field(name="to", type="string", meaning="receiving device or type", required=False),
        Field(name="gbit_per_s", type="number", meaning="rate", minimum=0.001, maximum=1e9),
        Field(name="latency_us", type="number", meaning="time of an empty transfer", minimum=0, maximum=1e9),
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


def cluster_digest(cluster: dict[str, Any]) -> str:
    """Digest of a cluster's content."""
    return document_checksum(cluster)
