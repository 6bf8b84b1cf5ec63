"""The adapt stage: plans, a workload, and the simulation of switching between them, beside each plan alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median_low
from typing import Any

from tessera_core.adapt.arrivals import read_arrivals
from tessera_core.adapt.controller import Controller, Decision, ladder
from tessera_core.adapt.model import PlanModel, plan_model
from tessera_core.adapt.simulate import Outcome, simulate
from tessera_core.deps.graph import Deps, load_deps
from tessera_core.plan.evaluate import statement_defects, structure_defects
from tessera_core.plan.ir import Plan, load_plan
from tessera_core.program.guards import beyond_lengths
from tessera_core.program.ir import Trace
from tessera_core.program.store import load_trace
from tessera_core.report.facts import Facts, FactTable
from tessera_formats.adapt import DECISIONS, REQUESTS, WINDOWS, write_adapt
from tessera_formats.errors import ArtifactError, InputError, OriginError
from tessera_formats.run import read_run
from tessera_formats.trace import check_same_program

ADAPTIVE = "adaptive"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptStage:
    """Follow a load over plans. ``window_ms`` and ``threshold``: the monitor's; ``observed``: a run to correct by."""

    window_ms: float = 300.0
    threshold: float = 1.5
    observed: Path | None = None

    def run(self, plans: Sequence[Path], trace: Path, deps: Path, workload: Path, output: Path) -> Facts:
        """Simulate and write the adapt artifact.

        Raises :class:`InputError` for fewer than two plans or an empty workload, :class:`OriginError` for
        artifacts of different programs or devices, :class:`ArtifactError` for a plan that is wrong or says too
        little, :class:`GuardError` for requests that the trace isn't valid for.
        """
        if len(plans) < 2:
            raise InputError("adapt switches between plans: name two or more, e.g. throughput and latency")
        loaded = [load_plan(path) for path in plans]
        names = plan_names(plans)
        described = load_trace(trace)
        analysed = load_deps(deps)
        digest = check_same_program(
            {
                str(trace): described.digest,
                str(deps): analysed.program_digest,
                **{str(path): plan.program_digest for path, plan in zip(plans, loaded, strict=True)},
            }
        )
        for path, plan in zip(plans, loaded, strict=True):
            if plan.facts["deps_digest"] != analysed.digest:
                raise OriginError(f"{path} was made from other deps than {deps}; run tessera partition again")
            _check_usable(path, plan, described, analysed)
            if set(plan.devices) != set(loaded[0].devices):
                raise OriginError(
                    f"{path} is for other devices than {plans[0]} ({_devices(plan)}; {_devices(loaded[0])});"
                    " adapt between plans of one cluster"
                )
        arrivals = read_arrivals(workload)
        longest = max(arrival.output_tokens for arrival in arrivals)
        routes = [route for plan in loaded for route in plan.routes]
        notes = [
            beyond_lengths([described.program(name) for name in route.programs], longest) for route in routes
        ]
        corrections = self._corrections(plans, loaded, digest)
        models = tuple(
            plan_model(name, plan, described, corrections.get(plan.digest, {}))
            for name, plan in zip(names, loaded, strict=True)
        )
        rungs = ladder(models, median_low([arrival.output_tokens for arrival in arrivals]))
        window_us = self.window_ms * 1e3
        controller = Controller(models, rungs, self.threshold)
        adaptive = simulate(models, arrivals, window_us=window_us, first=rungs[0], controller=controller)
        compared = [_summary(ADAPTIVE, adaptive)]
        for index, model in enumerate(models):
            compared.append(
                _summary(model.name, simulate(models, arrivals, window_us=window_us, first=index))
            )
        info = {
            "program_digest": digest,
            "plans": [models[i].name for i in (*rungs, *(i for i in range(len(models)) if i not in rungs))],
            "window_us": window_us,
            "threshold": self.threshold,
            "compared": compared,
        }
        write_adapt(output, info, _tables(models, adaptive))
        return _facts(models, rungs, adaptive, compared, output, next(filter(None, notes), None))

    def _corrections(
        self, paths: Sequence[Path], plans: Sequence[Plan], digest: str
    ) -> dict[str, dict[tuple[int, str], float]]:
        """Measured over planned interval by (route, program), for the plan that was observed."""
        if self.observed is None:
            return {}
        run = read_run(self.observed)
        check_same_program({str(paths[0]): digest, str(self.observed): str(run.info["program_digest"])})
        planned = str(run.info["plan_digest"])
        if planned not in {plan.digest for plan in plans}:
            raise InputError(
                f"{self.observed}: is a run of none of these plans; name the plan that it ran, or leave --observed out"
            )
        return {
            planned: {
                (row["route"], row["program"]): row["interval_us"] / row["planned_us"]
                for row in run.info["intervals"]
                if row["planned_us"] > 0 and row["interval_us"] > 0
            }
        }


def _check_usable(path: Path, plan: Plan, trace: Trace, deps: Deps) -> None:
    found = structure_defects(plan, trace, deps) or statement_defects(plan)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise ArtifactError(f"{path}: {found[0]}{more}; run tessera partition again")


def _devices(plan: Plan) -> str:
    return ", ".join(f"{device.name} of type {device.type}" for device in plan.devices)


def plan_names(paths: Sequence[Path]) -> tuple[str, ...]:
    """What plans are called here: their file names up to the first dot, numbered where they repeat."""
    stems = ["stdin" if str(path) == "-" else path.name.partition(".")[0] for path in paths]
    seen: Counter[str] = Counter()
    names = []
    for stem in stems:
        seen[stem] += 1
        names.append(stem if seen[stem] == 1 else f"{stem}#{seen[stem]}")
    return tuple(names)


def _summary(name: str, outcome: Outcome) -> dict[str, Any]:
    """Mean and 95th percentile (nearest rank) of latency, and tokens a second from first arrival to last end."""
    latencies = sorted(item.latency_us for item in outcome.served)
    begun = min(item.arrival.arrival_us for item in outcome.served)
    length = max(item.end_us for item in outcome.served) - begun
    tokens = sum(item.arrival.output_tokens for item in outcome.served)
    return {
        "plan": name,
        "mean_latency_us": fmean(latencies),
        "p95_latency_us": latencies[math.ceil(0.95 * len(latencies)) - 1],
        "tokens_per_s": tokens / length * 1e6,
    }


def _tables(models: Sequence[PlanModel], outcome: Outcome) -> Mapping[str, Any]:
    windows = [
        {
            "window": w.index,
            "start_us": w.start_us,
            "end_us": w.end_us,
            "plan": models[w.plan].name,
            "arrivals": w.arrivals,
            "completions": w.completions,
            "queued": w.queued,
            "running": w.running,
            "pressure": w.pressure(models[w.plan]),
            "mean_latency_us": w.mean_latency_us,
        }
        for w in outcome.windows
    ]
    decisions = [
        {
            "decision": number,
            "window": d.window,
            "at_us": d.at_us,
            "before": models[d.before].name,
            "after": models[d.after].name,
            "pressure": d.pressure,
            "reason": d.reason,
        }
        for number, d in enumerate(outcome.decisions)
    ]
    requests = [
        {
            "request": s.arrival.request,
            "plan": models[s.plan].name,
            "arrival_us": s.arrival.arrival_us,
            "start_us": s.start_us,
            "first_token_us": s.first_token_us,
            "end_us": s.end_us,
            "tokens": s.arrival.output_tokens,
        }
        for s in outcome.served
    ]
    return {
        "windows": WINDOWS.build(windows),
        "decisions": DECISIONS.build(decisions),
        "requests": REQUESTS.build(requests),
    }


def _facts(
    models: Sequence[PlanModel],
    rungs: Sequence[int],
    outcome: Outcome,
    compared: Sequence[Mapping[str, Any]],
    output: Path,
    note: str | None,
) -> Facts:
    columns = ("plan", "mean_latency_us", "p95_latency_us", "tokens_per_s")
    unused = [model.name for index, model in enumerate(models) if index not in rungs]
    changes = tuple(_change(models, decision) for decision in outcome.decisions)
    return Facts(
        "adaptation (simulated)",
        {
            **({"note": note} if note else {}),
            "ladder": [models[index].name for index in rungs],
            "beaten_in_latency_and_capacity": unused,
            "requests": len(outcome.served),
            "windows": len(outcome.windows),
            "decisions": len(outcome.decisions),
            "written": str(output),
        },
        (
            FactTable("compared", columns, tuple(tuple(row[name] for name in columns) for row in compared)),
            FactTable("changes", ("at_us", "before", "after", "pressure", "reason"), changes),
        ),
    )


def _change(models: Sequence[PlanModel], decision: Decision) -> tuple[Any, ...]:
    before, after = models[decision.before].name, models[decision.after].name
    return (decision.at_us, before, after, decision.pressure, decision.reason)
