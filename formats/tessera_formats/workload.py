"""The workload document (TOML, by hand): the requests that a run or an adaptation is fed with.

Either ``[[request]]`` entries, or ``[[phase]]`` entries from which arrivals are drawn with a counter-based
generator from ``seed`` (Poisson within a phase), or both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera_formats.document import DocumentSchema, Field, Record, read_document

LONGEST_MS = 86_400_000
"""A day: longer workloads are cut into several, since monitoring windows are kept one by one."""

_REQUEST = Record(
    (
        Field(name="arrival_ms", type="number", meaning="time of arrival", minimum=0, maximum=LONGEST_MS),
        Field(name="output_tokens", type="integer", meaning="tokens to generate", minimum=1),
    )
)
_PHASE = Record(
    (
        Field(name="start_ms", type="number", meaning="begin of the phase", minimum=0, maximum=LONGEST_MS),
        Field(name="end_ms", type="number", meaning="end of the phase", minimum=0, maximum=LONGEST_MS),
        Field(name="requests_per_s", type="number", meaning="mean arrival rate", minimum=0),
        Field(name="output_tokens", type="integer", meaning="tokens to generate per request", minimum=1),
    )
)
WORKLOAD_VERSIONS = {
    1: DocumentSchema(
        kind="workload",
        version=1,
        kind_optional=True,
        record=Record(
            (
                Field(
                    name="seed",
                    type="integer",
                    meaning="seed of arrivals and prompts",
                    required=False,
                    minimum=0,
                ),
                Field(
                    name="request",
                    type="records",
                    meaning="explicit requests",
                    required=False,
                    inner=_REQUEST,
                ),
                Field(
                    name="phase",
                    type="records",
                    meaning="phases of random arrivals",
                    required=False,
                    inner=_PHASE,
                ),
            )
        ),
    )
}
WORKLOAD = WORKLOAD_VERSIONS[1]


def read_workload(path: Path | str) -> dict[str, Any]:
    """Open a workload file (``-``: standard input)."""
    return read_document(path, WORKLOAD_VERSIONS)
