"""Predicted beside measured: llama-tiny on two CPU workers, kernel placement and data parallelism.

The profile is taken with both workers busy, as the run will find them: kernels of a placement beside the other half
of the model, kernels of a copy beside another copy. What the placement would be planned at from the times beside a
copy is recorded as well (``planned_beside_copies_us``): the difference is what sharing one model does to the caches.
Each strategy is run five times; its interval is the median over the runs of the steady interval between decode
iterations. Every run's outputs are compared with the unpartitioned model's. Other load on the machine shows in the
measured intervals: run it alone.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import Bar, report
from tessera_core.deps.stage import DepsStage
from tessera_core.execute.stage import RunStage
from tessera_core.plan.ir import Plan, load_plan
from tessera_core.plan.stage import PartitionStage
from tessera_core.profile.stage import ProfileStage
from tessera_core.trace.request import parse_program
from tessera_core.trace.stage import TraceStage
from tessera_formats.profile import TIMES, read_profile, write_profile
from tessera_formats.run import read_run

MODEL = "llama-tiny"
PROGRAMS = ("prefill:batch=4,context=16", "decode:batch=16,context=64")
CLUSTER = "".join(f'[[device]]\nname = "w{i}"\ntype = "cpu-1thread"\nmemory_gb = 4\n' for i in range(2))
RUNS = 5
SLOTS = 4
TOLERANCE = 0.2
"""How far the measured interval may be from the planned one."""


def measure(folder: Path, plan: Path) -> dict[str, Any]:
    """Run a plan several times: its predictions beside what was measured."""
    predicted = load_plan(plan)
    intervals, rates, token_times, equal = [], [], [], 0
    for number in range(RUNS):
        output = folder / f"{plan.name}.{number}.run"
        facts = RunStage(verify=True).run(plan, folder / "x.trace", folder / "x.deps", output)
        info = read_run(output).info
        equal += info["verified"] == "equal"
        rates.append(info["tokens_per_s"])
        token_times.append(facts.values["time_per_token_us"])
        own = [row for row in info["intervals"] if row["program"] == PROGRAMS[1] and row["iterations"]]
        intervals.append(_together([row["interval_us"] for row in own]))
    return {
        "slots": sum(route.slots for route in predicted.routes),
        "kernels": _kernels(predicted),
        "crossings": sum(item.program == PROGRAMS[1] for item in predicted.transfers),
        "planned_interval_us": _planned(predicted),
        "interval_us": statistics.median(intervals),
        "interval_runs_us": intervals,
        "planned_tokens_per_s": predicted.facts["prediction"]["tokens_per_s"],
        "tokens_per_s": statistics.median(rates),
        "time_per_token_us": statistics.median(token_times),
        "runs_equal": equal,
    }


def planned_beside_copies(folder: Path, profile: Path) -> float:
    """The interval of a placement that is planned as if its neighbour held the whole model too."""
    held = read_profile(profile)
    rows = [row for row in held.table.to_pylist() if row["condition"] != "beside"]
    for row in rows:
        row["condition"] = {"copies": "beside"}.get(row["condition"], row["condition"])
    other, plan = folder / "copies.profile.arrow", folder / "copies.plan.toml"
    write_profile(other, held.header, TIMES.build(rows))
    PartitionStage(strategy="placement", in_flight=SLOTS).run(
        folder / "x.trace", folder / "x.deps", [other], folder / "cluster.toml", plan
    )
    return _planned(load_plan(plan))


def _planned(plan: Plan) -> float:
    return _together(
        [
            row["simulated_us"]
            for row in plan.facts["prediction"]["intervals"]
            if row["program"] == PROGRAMS[1]
        ]
    )


def _together(intervals: list[float]) -> float:
    """The interval of routes side by side: their rates add."""
    return 1 / sum(1 / interval for interval in intervals) if intervals and all(intervals) else 0.0


def _kernels(plan: Plan) -> dict[str, int]:
    counts: dict[str, int] = {device.name: 0 for device in plan.devices}
    for item in plan.assignments:
        counts[item.device] += item.program == PROGRAMS[1]
    return counts


def main() -> int:
    """Trace, profile, plan, run and compare."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cluster.toml").write_text(CLUSTER, encoding="utf-8")
        trace, deps, profile = folder / "x.trace", folder / "x.deps", folder / "x.profile.arrow"
        TraceStage(model=MODEL, programs=tuple(parse_program(text) for text in PROGRAMS)).run(trace)
        DepsStage().run(trace, deps)
        ProfileStage(devices=("cpu-1thread=cpu:0",), beside="cpu:1").run(trace, profile)
        results: dict[str, Any] = {}
        for strategy, slots in (("placement", SLOTS), ("data-parallel", None)):
            plan = folder / f"{strategy}.plan.toml"
            PartitionStage(strategy=strategy, in_flight=slots).run(
                trace, deps, [profile], folder / "cluster.toml", plan
            )
            results[strategy] = measure(folder, plan)
        results["placement"]["planned_beside_copies_us"] = planned_beside_copies(folder, profile)
    placed = results["placement"]
    ratio = placed["interval_us"] / placed["planned_interval_us"]
    return report(
        "pipeline",
        results,
        [
            Bar(
                "placement: measured over planned interval, median of five runs",
                round(ratio, 4),
                f"{1 - TOLERANCE:g} to {1 + TOLERANCE:g}",
                abs(ratio - 1) <= TOLERANCE,
            ),
            Bar("placement: slots in flight", placed["slots"], f"= {SLOTS}", placed["slots"] == SLOTS),
            Bar(
                "placement: kernels on the emptier worker",
                min(placed["kernels"].values()),
                ">= 1",
                min(placed["kernels"].values()) >= 1,
            ),
            Bar("placement: crossings", placed["crossings"], ">= 1", placed["crossings"] >= 1),
            *(
                Bar(
                    f"{strategy}: runs whose outputs equal the unpartitioned model's",
                    found["runs_equal"],
                    f"= {RUNS}",
                    found["runs_equal"] == RUNS,
                )
                for strategy, found in results.items()
            ),
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
