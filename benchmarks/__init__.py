"""Benchmarks: ``python -m benchmarks.NAME`` prints one JSON object and ends with 0 only where every bar holds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from tessera_core.devices.cpu import processor_name, usable_cpus


@dataclass(frozen=True, slots=True)
class Bar:
    """A claim: its name, the value found, what it must be, and whether it is."""

    name: str
    value: Any
    bar: str
    holds: bool


def report(
    benchmark: str, results: Mapping[str, Any], bars: Sequence[Bar], machine: str | None = None
) -> int:
    """Print a benchmark's findings as JSON; gives the exit code. ``machine``: else the processor is named."""
    machine = machine or f"{processor_name()}, {len(usable_cpus())} CPUs"
    found = {
        "benchmark": benchmark,
        "machine": machine,
        "date": datetime.now(UTC).date().isoformat(),
        "results": results,
        "bars": [asdict(bar) for bar in bars],
    }
    print(json.dumps(found, indent=2))
    return 0 if all(bar.holds for bar in bars) else 1
