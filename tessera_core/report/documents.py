"""What the single-file artifacts say, as facts: profile, plan, cluster and workload."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from tessera_core.report.facts import Facts, FactTable, rows_of
from tessera_formats.artifact import TableArtifact

COMPARED = (
    "strategy", "feasible", "chosen", "batch", "slots", "devices", "interval_us", "latency_us", "tokens_per_s",
    "time_per_token_us", "modelled_share", "probability_best", "reason",
)  # fmt: skip
"""Columns in which strategies are compared, everywhere."""


def describe_profile(profile: TableArtifact) -> Facts:
    """Times by device type, condition and source; devices and links."""
    groups: dict[tuple[str, str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in profile.table.to_pylist():
        groups[row["device_type"], row["condition"], row["cache"], row["source"]].append(row)
    times = tuple(
        (
            *key,
            len(rows),
            min(row["samples"] for row in rows),
            median(row["median_us"] for row in rows),
            max(row["median_us"] for row in rows),
        )
        for key, rows in sorted(groups.items())
    )
    links = (
        "source",
        "destination",
        "origin",
        "transport",
        "dated",
        "latency_us",
        "gbit_per_s",
        "send_us",
        "receive_us",
    )
    devices = ("device_type", "source", "hardware", "threads", "overhead_us", "date")
    return Facts(
        "times of kernels and links",
        {
            "kind": "profile",
            "digest": profile.digest,
            "program_digest": profile.header["program_digest"],
            "times": profile.table.num_rows,
        },
        (
            FactTable("devices", devices, rows_of(profile.header["devices"], devices)),
            FactTable("links", links, rows_of([{"dated": "", **row} for row in profile.header["links"]], links)),
            FactTable(
                "times by source",
                ("device type", "condition", "cache", "source", "signatures", "least samples",
                 "median_us", "longest_us"),
                times,
            ),
            FactTable(
                "origins",
                ("device_type", "source", "from", "beside", "dtypes", "oldest", "newest", "signatures", "farthest"),
                _origin_rows(profile.table.to_pylist()),
            ),
        ),
    )  # fmt: skip


def _origin_rows(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[Any, ...], ...]:
    """Rows by the hardware, published table or model that they come from, with their days.

    ``farthest``: by what factor the size of a kernel differs from the nearest one in the table, at most.
    """
    groups: dict[tuple[str, str, str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["device_type"], row["source"], row["hardware"] or row["table"], row["load"]].append(row)
    return tuple(
        (
            *key,
            ", ".join(sorted({row["dtype"] for row in found})),
            min(row["dated"] for row in found),
            max(row["dated"] for row in found),
            len({row["signature"] for row in found}),
            round(math.exp(max(row["distance"] for row in found)), 2) if key[1] == "silicon" else None,
        )
        for key, found in sorted(groups.items())
    )


def describe_plan(plan: Mapping[str, Any]) -> Facts:
    """Strategies compared, routes, intervals, load and memory per device, and what crosses."""
    prediction = plan["prediction"]
    routes = ("route", "share", "batch", "slots", "programs", "rates")
    intervals = ("route", "program", "resource_us", "latency_us", "interval_us", "simulated_us")
    memory = ("device", "weight_bytes", "state_bytes", "activation_bytes", "capacity_bytes")
    cycles = ("route", "resource_us", "latency_us", "interval_us", "simulated_us", "token_us")
    numbers = {name: value for name, value in prediction.items() if name not in ("intervals", "cycles")}
    names = ("policy", "requested", "strategy", "condition", "targets", "program_digest", "deps_digest",
             "profile_digest", "cluster_digest")  # fmt: skip
    return Facts(
        f"plan for {plan['policy']} by {plan['strategy']}",
        {**{name: plan[name] for name in names}, **numbers},
        (
            FactTable("compared", COMPARED, rows_of(plan["compared"], COMPARED)),
            FactTable("routes", routes, rows_of(plan["route"], routes)),
            FactTable("intervals", intervals, rows_of(prediction["intervals"], intervals)),
            FactTable("cycles", cycles, rows_of(prediction.get("cycles", ()), cycles)),
            FactTable("work", ("route", "program", "device", "kernels", "time_us"), _work_rows(plan)),
            FactTable("memory", memory, rows_of(plan["memory"], memory)),
            FactTable(
                "transfers per iteration",
                ("route", "program", "source", "destination", "transfers", "bytes", "time_us"),
                _transfer_rows(plan),
            ),
        ),
    )


def describe_cluster(cluster: Mapping[str, Any]) -> Facts:
    """Devices and links as the file states them."""
    optional = ("count", "memory_gb", "memory_domain", "price_per_hour", "host", "hardware")
    devices = tuple(
        (row["name"], row["type"], *(row.get(name) for name in optional)) for row in cluster["device"]
    )
    links = tuple(
        (
            " - ".join(row["between"]) if "between" in row else f"{row.get('from')} -> {row.get('to')}",
            row["gbit_per_s"],
            row["latency_us"],
            row.get("transport"),
            row.get("measured"),
        )
        for row in cluster.get("link", [])
    )
    return Facts(
        "cluster",
        {"devices": sum(row.get("count", 1) for row in cluster["device"])},
        (
            FactTable("device", ("name", "type", *optional), devices),
            FactTable("link", ("between", "gbit_per_s", "latency_us", "transport", "measured"), links),
        ),
    )


def describe_workload(workload: Mapping[str, Any]) -> Facts:
    """Explicit requests, and phases from which arrivals are drawn."""
    phases = ("start_ms", "end_ms", "requests_per_s", "output_tokens")
    return Facts(
        "workload",
        {"seed": workload.get("seed", 0), "requests": len(workload.get("request", []))},
        (FactTable("phases", phases, rows_of(workload.get("phase", []), phases)),),
    )


def _work_rows(plan: Mapping[str, Any]) -> tuple[tuple[Any, ...], ...]:
    work: dict[tuple[int, str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for row in plan["assignment"]:
        entry = work[row["route"], row["program"], row["device"]]
        entry[0] += 1
        entry[1] += row["time_us"]
    return tuple((*key, *entry) for key, entry in sorted(work.items()))


def _transfer_rows(plan: Mapping[str, Any]) -> tuple[tuple[Any, ...], ...]:
    moved: dict[tuple[int, str, str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for row in plan["transfer"]:
        entry = moved[row["route"], row["program"], row["source"], row["destination"]]
        entry[0] += 1
        entry[1] += row["bytes"]
        entry[2] += row["time_us"]
    return tuple((*key, *entry) for key, entry in sorted(moved.items()))
