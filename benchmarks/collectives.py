"""The catalogue's figures of collectives against public NCCL tables (package aiconfigurator-core, extra ``silicon``).

For each system the time of the smallest message over the ring's steps gives a start and a step, and the largest
message a share of the link's rate; the figures are medians over systems. The error is the catalogue's own model's, by
kind of link: of the system that it suits least, the median relative error over all messages.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow.parquet as parquet

from benchmarks import Bar, report
from tessera_core.devices.modelled import ModelledDevice
from tessera_core.profile.catalogue import catalogue
from tessera_core.profile.model.collective import Collective, collective_time

SYSTEMS = {
    "a100_sxm/comm/nccl/2.27.3": "a100-80gb",
    "h100_sxm/comm/nccl/2.29.2": "h100-sxm",
    "h200_sxm/comm/nccl/2.29.2": "h200-sxm",
    "b200_sxm/comm/nccl/2.29.2": "b200-sxm",
    "l40s/comm/nccl/2.27.3": "l40s",
    "rtx_pro_6000_server/comm/nccl/2.29.2": "rtx-pro-6000",
}
"""Folder of a table, and the device type that it is of."""
HALF_BYTES = 2
AGREEMENT = 0.02
"""Relative difference up to which a figure of the catalogue is the fitted one, rounded."""

Sample = tuple[Collective, float]
"""A collective and its measured time in microseconds."""


def samples(root: Path, folder: str) -> list[Sample]:
    """All-reduces and all-gathers of a table; messages are of half-precision elements."""
    found = []
    for row in parquet.read_table(root / folder / "nccl_perf.parquet").to_pylist():
        if row["nccl_dtype"] != "half" or row["op_name"] not in ("all_reduce", "all_gather"):
            continue
        ranks, size = int(row["num_gpus"]), int(row["message_size"]) * HALF_BYTES
        rounds = 2 if row["op_name"] == "all_reduce" else 1
        work = Collective(
            name=row["op_name"].replace("_", "-"),
            ranks=ranks,
            steps=rounds * (ranks - 1),
            sent_bytes=rounds * (ranks - 1) * size // ranks,
        )
        found.append((work, float(row["latency"]) * 1e3))
    return found


def start_and_step(found: Sequence[Sample]) -> tuple[float, float]:
    """Least squares of the time over the steps, among each collective's smallest messages."""
    least: dict[tuple[str, int], Sample] = {}
    for work, time_us in found:
        key = (work.name, work.ranks)
        if key not in least or work.sent_bytes < least[key][0].sent_bytes:
            least[key] = (work, time_us)
    step, start = statistics.linear_regression(
        [work.steps for work, _ in least.values()], [time_us for _, time_us in least.values()]
    )
    return start, step


def shares(found: Sequence[Sample], gbyte_per_s: float) -> list[float]:
    """Share of the link's rate that each collective's largest message reaches."""
    largest: dict[tuple[str, int], Sample] = {}
    for work, time_us in found:
        key = (work.name, work.ranks)
        if key not in largest or work.sent_bytes > largest[key][0].sent_bytes:
            largest[key] = (work, time_us)
    return [work.sent_bytes / time_us * 1e6 / (gbyte_per_s * 1e9) for work, time_us in largest.values()]


def fit(tables: Mapping[str, Sequence[Sample]]) -> dict[str, float]:
    """The catalogue's figures as these tables give them."""
    starts: list[float] = []
    steps: list[float] = []
    reached: dict[str, list[float]] = {"peer": [], "host": []}
    missed: dict[str, list[float]] = {"peer": [], "host": []}
    for name, found in tables.items():
        device = ModelledDevice.of(name)
        start, step = start_and_step(found)
        starts.append(start)
        steps.append(step)
        peer, host = device.type.peer_gbyte_per_s, device.type.host_gbyte_per_s
        link = "host" if peer is None else "peer"
        rate = host if peer is None else peer
        assert rate is not None
        reached[link] += shares(found, rate)
        errors = [abs(collective_time(work, device).median_us / time_us - 1) for work, time_us in found]
        missed[link].append(statistics.median(errors))
    return {
        "start_us": statistics.median(starts),
        "step_us": statistics.median(steps),
        **{f"{link}_share": statistics.median(found) for link, found in reached.items()},
        **{f"{link}_error": max(found) for link, found in missed.items()},
    }


def main() -> int:
    """Fit, and compare with the catalogue."""
    package = importlib.util.find_spec("aiconfigurator_core")
    if package is None or package.origin is None:
        print(
            "collectives: needs aiconfigurator-core; run: pip install aiconfigurator-core==0.12.0",
            file=sys.stderr,
        )
        return 1
    root = Path(package.origin).parent / "systems" / "data"
    tables = {name: samples(root, folder) for folder, name in SYSTEMS.items()}
    fitted, stated = fit(tables), catalogue().collective
    bars = [
        Bar(
            f"{name}: fitted against the catalogue's {getattr(stated, name)}",
            round(value, 3),
            f"within {AGREEMENT:.0%}, or 0.005",
            abs(value - getattr(stated, name)) <= max(AGREEMENT * value, 0.005),
        )
        for name, value in fitted.items()
    ]
    return report("collectives", {name: round(value, 3) for name, value in fitted.items()}, bars)


if __name__ == "__main__":
    sys.exit(main())
