"""What the folder artifacts say, as facts: trace, deps, run and adapt."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from tessera_core.report.facts import Facts, FactTable, rows_of
from tessera_formats.bundle import Bundle

# As many windows as a reader takes in at once; the artifact's table holds them all.
_ROWS_SHOWN = 40


def describe_trace(bundle: Bundle) -> Facts:
    """Programs, kernels by kind, buffers by kind, captured targets."""
    info = bundle.info
    kernels = bundle.table("kernels").to_pylist()
    ops = Counter(bundle.table("ops").column("program").to_pylist())
    programs = []
    for row in bundle.table("programs").to_pylist():
        mine = [kernel for kernel in kernels if kernel["program"] == row["program"]]
        programs.append(
            (
                row["name"],
                len(mine),
                len({kernel["signature"] for kernel in mine}),
                ops[row["program"]],
                sum(kernel["flops"] for kernel in mine),
                sum(kernel["read_bytes"] for kernel in mine),
                sum(kernel["written_bytes"] for kernel in mine),
            )
        )
    buffers = bundle.table("buffers").to_pylist()
    return Facts(
        f"trace of {info['model']}",
        {
            **{
                name: info[name]
                for name in ("model", "source", "dtype", "seed", "fake", "replayable", "notes")
            },
            **{name: info[name] for name in ("tensor_parallel", "rank") if name in info},
            "weights": bundle.table("weights").num_rows,
            "versions": info["versions"],
        },
        (
            FactTable(
                "programs",
                ("program", "kernels", "signatures", "ops", "flops", "read_bytes", "written_bytes"),
                tuple(programs),
            ),
            _grouped(
                "kernels by kind", "kind", kernels, {"flops": "flops", "read_bytes": "read_bytes"}, "kernels"
            ),
            _grouped("buffers by kind", "kind", buffers, {"bytes": "bytes"}, "buffers"),
            FactTable("state", ("family", "batch axis", "sequence axis"), _state_rows(bundle)),
            FactTable("targets", ("target", "launches", "modules"), _target_rows(bundle)),
        ),
    )


def describe_deps(bundle: Bundle) -> Facts:
    """Coverage by evidence, and dependencies by hazard."""
    info = bundle.info
    edges = bundle.table("edges")
    hazards = Counter(zip(edges["target"].to_pylist(), edges["hazard"].to_pylist(), strict=True))
    shippable = Counter(
        target
        for target, hazard, must in zip(
            edges["target"].to_pylist(), edges["hazard"].to_pylist(), edges["must"].to_pylist(), strict=True
        )
        if hazard == "RAW" and must
    )
    rows = [
        (target, *(hazards[target, hazard] for hazard in ("RAW", "WAR", "WAW")), shippable[target])
        for target in info["targets"]
    ]
    coverage = bundle.table("coverage").to_pylist()
    return Facts(
        "dependencies between kernels",
        {
            "targets": info["targets"],
            "modules": len(info["modules"]),
            "unknown_opcodes": info["unknown_opcodes"],
        },
        (
            FactTable(
                "coverage",
                ("target", "evidence", "precision", "accesses", "kernels", "edges"),
                rows_of(coverage, ("target", "evidence", "precision", "accesses", "kernels", "edges")),
            ),
            FactTable("dependencies", ("target", "RAW", "WAR", "WAW", "RAW proven written"), tuple(rows)),
        ),
    )


def describe_run(bundle: Bundle) -> Facts:
    """Intervals beside the plan's, what each device did, and how the requests fared."""
    info = bundle.info
    work: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0])
    for span in bundle.table("spans").to_pylist():
        entry = work[span["device"], span["kind"]]
        entry[0] += 1
        entry[1] += span["end_us"] - span["start_us"]
        entry[2] += span["bytes"]
    duration = info["duration_us"]
    spans = tuple(
        (device, kind, count, busy, busy / duration if duration else 0.0, moved)
        for (device, kind), (count, busy, moved) in sorted(work.items())
    )
    names = ("backend", "status", "lost", "verified", "duration_us", "tokens_per_s", "machine", "plan_digest")
    return Facts(
        f"run on {info['backend']}",
        {**{name: info[name] for name in names}, "files": sorted(bundle.file_entries)},
        (
            FactTable(
                "intervals",
                ("route", "program", "interval_us", "planned_us", "iterations"),
                rows_of(info["intervals"], ("route", "program", "interval_us", "planned_us", "iterations")),
            ),
            FactTable("work", ("device", "kind", "spans", "busy_us", "busy_share", "bytes"), spans),
            FactTable(
                "requests",
                ("status", "requests", "tokens", "mean_first_token_us", "mean_latency_us"),
                _request_rows(bundle.table("requests").to_pylist()),
            ),
        ),
    )


def describe_adapt(bundle: Bundle) -> Facts:
    """Adaptive beside each plan alone, the decisions, and the windows."""
    info = bundle.info
    compared = ("plan", "mean_latency_us", "p95_latency_us", "tokens_per_s")
    decisions = ("at_us", "before", "after", "pressure", "reason")
    windows = ("window", "start_us", "plan", "arrivals", "completions", "queued", "running", "pressure")
    count = bundle.table("windows").num_rows
    return Facts(
        "adaptation in simulation",
        {
            **{name: info[name] for name in ("plans", "window_us", "threshold")},
            "requests": bundle.table("requests").num_rows,
            "decisions": bundle.table("decisions").num_rows,
            "windows": count,
        },
        (
            FactTable("compared", compared, rows_of(info["compared"], compared)),
            FactTable("changes", decisions, rows_of(bundle.table("decisions").to_pylist(), decisions)),
            FactTable(
                f"first {_ROWS_SHOWN} windows" if count > _ROWS_SHOWN else "all windows",
                windows,
                rows_of(bundle.table("windows").slice(0, _ROWS_SHOWN).to_pylist(), windows),
            ),
        ),
    )


def _grouped(
    title: str, key: str, rows: list[dict[str, Any]], sums: Mapping[str, str], counted: str
) -> FactTable:
    """Rows counted by ``key``, with sums of some columns, most frequent first."""
    counts = Counter(row[key] for row in rows)
    totals = {name: Counter[str]() for name in sums}
    for row in rows:
        for name, column in sums.items():
            totals[name][row[key]] += row[column]
    ordered = sorted(counts, key=lambda name: (-counts[name], name))
    return FactTable(
        title,
        (key, counted, *sums),
        tuple((name, counts[name], *(totals[column][name] for column in sums)) for name in ordered),
    )


def _state_rows(bundle: Bundle) -> tuple[tuple[Any, ...], ...]:
    """State families; repeated layers of one shape are one row, as ``NAME.{0..n}`` would be."""
    groups: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for row in bundle.table("states").to_pylist():
        groups[row["batch_axis"], row["sequence_axis"]].append(row["name"])
    return tuple(
        (names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)})", *axes)
        for axes, names in groups.items()
    )


def _target_rows(bundle: Bundle) -> tuple[tuple[Any, ...], ...]:
    return tuple(
        (
            target,
            bundle.table(f"targets/{target}/launches").num_rows,
            bundle.table(f"targets/{target}/modules").num_rows,
        )
        for target in bundle.targets()
    )


def _request_rows(requests: list[dict[str, Any]]) -> tuple[tuple[Any, ...], ...]:
    rows = []
    for status in sorted({request["status"] for request in requests}):
        mine = [request for request in requests if request["status"] == status]
        rows.append(
            (
                status,
                len(mine),
                sum(request["tokens"] for request in mine),
                _mean(mine, "first_token_us"),
                _mean(mine, "end_us"),
            )
        )
    return tuple(rows)


def _mean(requests: list[dict[str, Any]], until: str) -> float | None:
    times = [r[until] - r["arrival_us"] for r in requests if r[until] is not None]
    return sum(times) / len(times) if times else None
