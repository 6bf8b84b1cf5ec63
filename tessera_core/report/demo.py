"""The demonstration's closing table, and the load that it adapts to; both read from the artifacts in its folder."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tessera_core.plan.figures import overlap, phase_sums, tokens_per_request
from tessera_core.plan.ir import Plan, load_plan
from tessera_core.report.facts import Facts, FactTable
from tessera_formats.adapt import read_adapt
from tessera_formats.deps import OPS_TARGET, read_deps
from tessera_formats.run import read_run
from tessera_formats.trace import read_trace

# Load in shares of the latency plan's own capacity, so that every machine sees the plan change: quiet, a burst
# that this plan can't carry, quiet again. Times in milliseconds.
_PHASES = ((0, 1500, 0.4), (1500, 3000, 2.0), (3000, 6000, 0.3))

COLUMNS = (
    "devices", "strategy", "batch", "slots", "predicted_us", "measured_us", "of_plan", "tokens_per_s",
    "modelled_share",
)  # fmt: skip
"""``predicted_us``, ``measured_us``: interval between decode iterations over all devices; ``of_plan``:
the measured one in shares of the other. ``tokens_per_s``: measured where that is, else predicted."""


def demo_workload(plan: Path, output_tokens: int) -> str:
    """A workload file whose burst is more than ``plan`` can carry."""
    requests_per_s = float(load_plan(plan).facts["prediction"]["tokens_per_s"]) / output_tokens
    phases = "".join(
        f"\n[[phase]]\nstart_ms = {start}\nend_ms = {end}\n"
        f"requests_per_s = {requests_per_s * share:.1f}\noutput_tokens = {output_tokens}\n"
        for start, end, share in _PHASES
    )
    return f"# In shares of what {plan.name} can carry: {', '.join(str(p[2]) for p in _PHASES)}.\nseed = 7\n{phases}"


def closing_facts(
    trace: Path, deps: Path, gpu_plan: Path, cpu_plans: Sequence[Path], runs: Sequence[Path], adapt: Path
) -> Facts:
    """What the demonstration found. ``runs`` belong to ``cpu_plans``, one by one."""
    kernels = read_trace(trace).table("kernels")
    gpu = load_plan(gpu_plan)
    measured = {}
    for plan_path, run_path in zip(cpu_plans, runs, strict=True):
        plan = load_plan(plan_path)
        measured[plan.facts["strategy"]] = _measured(plan, read_run(run_path).info["intervals"])
    verified = {read_run(run).info["verified"] for run in runs}
    adapted = {row["plan"]: row for row in read_adapt(adapt).info["compared"]}
    rows = [
        *_rows("A100 + L40S", gpu, {}),
        *_rows("2 CPU workers", load_plan(cpu_plans[0]), measured),
    ]
    return Facts(
        "demonstration",
        {
            "kernels": kernels.num_rows,
            "different_kernels": len(set(kernels["signature"].to_pylist())),
            "dependencies_by_evidence": dict(_edges_by_evidence(deps)),
            "best_on_a100_and_l40s": gpu.facts["strategy"],
            "plan_changes_under_load": read_adapt(adapt).table("decisions").num_rows,
            "mean_latency_under_load": {
                name: f"{row['mean_latency_us'] / 1e3:.1f} ms" for name, row in adapted.items()
            },
            "outputs_equal": verified == {"equal"},
        },
        (FactTable("strategies", COLUMNS, tuple(rows)),),
    )


def _measured(plan: Plan, intervals: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """Interval over all routes of the last program, and tokens a second; None where a route shows no interval."""
    times = {(row["route"], row["program"]): float(row["interval_us"]) for row in intervals}
    last = [times.get((route.route, route.programs[-1]), 0.0) for route in plan.routes]
    if not all(last) or not all(times.get((r.route, p), 0.0) for r in plan.routes for p in r.programs):
        return None
    shares = overlap(plan)
    requests_per_s = {
        number: 1e6 * route.batch / (total * shares[number])
        for route, (number, total) in zip(plan.routes, phase_sums(plan.routes, times).items(), strict=True)
    }
    tokens_per_s = sum(requests_per_s[route.route] * tokens_per_request(route) for route in plan.routes)
    return 1.0 / sum(1.0 / time for time in last), tokens_per_s


def _rows(
    devices: str, plan: Plan, measured: Mapping[str, tuple[float, float] | None]
) -> Iterator[tuple[Any, ...]]:
    for row in plan.facts["compared"]:
        if not row["feasible"]:
            continue
        found = measured.get(row["strategy"])
        yield (
            devices,
            row["strategy"],
            row["batch"],
            row["slots"],
            row["interval_us"],
            found[0] if found else None,
            found[0] / row["interval_us"] if found else None,
            found[1] if found else row["tokens_per_s"],
            row["modelled_share"],
        )


def _edges_by_evidence(path: Path) -> Counter[str]:
    """Dependencies by what proves their two ends, over the captured target.

    A target's own accesses stand in for those of all builds where it has any of the kernel to the buffer.
    """
    deps = read_deps(path)
    target = deps.info["targets"][-1]
    evidence: dict[tuple[str, int, int, int, str], set[str]] = defaultdict(set)
    for row in deps.table("accesses").drop_columns(["boxes"]).to_pylist():
        evidence[row["target"], row["program"], row["kernel"], row["buffer"], row["mode"]].add(
            row["evidence"]
        )
    counts: Counter[str] = Counter()
    for row in deps.table("edges").drop_columns(["boxes"]).to_pylist():
        if row["target"] != target:
            continue
        ends: set[str] = set()
        for end, mode in (("source", row["hazard"] != "WAR"), ("destination", row["hazard"] != "RAW")):
            key = (row["program"], row[end], row["buffer"], "write" if mode else "read")
            ends |= evidence.get((target, *key)) or evidence.get((OPS_TARGET, *key)) or {row["evidence"]}
        counts[" + ".join(sorted(ends))] += 1
    return counts
