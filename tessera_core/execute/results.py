"""What a run writes and reports: tables, steady intervals, and the summary beside the plan's predictions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tessera_core.execute.batches import RequestBatch
from tessera_core.execute.perfetto import perfetto_json
from tessera_core.execute.pipeline import Outcome
from tessera_core.execute.segments import RouteModel
from tessera_core.execute.simulator import Completion, Span, completions, steady
from tessera_core.plan.ir import Plan
from tessera_core.report.facts import Facts, FactTable
from tessera_formats.run import OUTPUTS, REQUESTS, SPANS, write_run

# Not dataclasses.asdict, which copies every value of what may be millions of spans.
_SPAN_COLUMNS = tuple(field.name for field in fields(Span))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """A finished (or lost) run with what was asked of it."""

    plan: Plan
    models: tuple[RouteModel, ...]
    batches: tuple[RequestBatch, ...]
    outcome: Outcome
    backend: str
    verified: str
    machine: str

    def write(self, output: Path) -> Facts:
        """Write the run artifact and give the summary; raises :class:`ArtifactError` if it can't be written."""
        spans = sorted(
            self.outcome.spans, key=lambda span: (span.start_us, span.device, span.end_us, span.batch)
        )
        ends = self._ends()
        requests = [row for item in self.batches for row in self._requests(item, ends)]
        intervals = self._intervals()
        finished = [row for row in requests if row["status"] == "finished"]
        duration = max((row["end_us"] for row in finished), default=0.0) - min(
            (row["arrival_us"] for row in finished), default=0.0
        )
        generated = sum(max(row["tokens"], 1) for row in finished)
        rate = generated / duration * 1e6 if duration else 0.0
        info = {
            "program_digest": self.plan.program_digest,
            "plan_digest": self.plan.digest,
            "backend": self.backend,
            "status": "lost" if self.outcome.lost else "finished",
            "lost": self.outcome.lost,
            "verified": self.verified,
            "duration_us": duration,
            "tokens_per_s": rate,
            "intervals": intervals,
            "machine": self.machine,
        }
        tables = {
            "spans": SPANS.build([{name: getattr(span, name) for name in _SPAN_COLUMNS} for span in spans]),
            "requests": REQUESTS.build(requests),
            "outputs": OUTPUTS.build([row for item in self.batches for row in self._outputs(item)]),
        }
        write_run(output, info, tables, {"perfetto.json": perfetto_json(self.models, spans)})
        return self._facts(output, info, requests, finished)

    def _ends(self) -> Mapping[int, Mapping[int, Completion]]:
        """Batch -> iteration -> its completion."""
        ends: dict[int, dict[int, Completion]] = defaultdict(dict)
        for item in completions(self.outcome.spans):
            ends[item.batch][item.iteration] = item
        return ends

    def _requests(
        self, item: RequestBatch, ends: Mapping[int, Mapping[int, Completion]]
    ) -> list[dict[str, Any]]:
        batch = item.plan.batch
        finished = batch in self.outcome.finished
        model = self.models[item.plan.route]
        prompt = sum(item.plan.iterations[:-1])
        rows = []
        for row, request in enumerate(item.requests):
            first = last = None
            if finished:
                # Each prefill iteration gives the first token of its own rows, then one per decode iteration.
                begin = row * prompt // model.batch if prompt else 0
                final = prompt + request.output_tokens - 1 - (1 if prompt else 0)
                first = ends[batch][begin].end_us
                last = first if prompt and request.output_tokens == 1 else ends[batch][final].end_us
            rows.append(
                {
                    "request": request.request,
                    "route": model.route,
                    "batch": batch,
                    "slot": self.outcome.lanes.get(batch, 0),
                    "status": "finished" if finished else "lost",
                    "tokens": request.output_tokens if finished and self._makes_tokens(batch) else 0,
                    "arrival_us": request.arrival_us,
                    "first_token_us": first,
                    "end_us": last,
                }
            )
        return rows

    def _makes_tokens(self, batch: int) -> bool:
        return self.backend == "simulate" or bool(self.outcome.tokens.get(batch))

    def _outputs(self, item: RequestBatch) -> list[dict[str, Any]]:
        if item.plan.batch not in self.outcome.finished:
            return []
        tokens = self.outcome.tokens.get(item.plan.batch, {})
        prompt = sum(item.plan.iterations[:-1])
        made: list[list[int]] = []
        if prompt and tokens:
            made.append([token for iteration in range(prompt) for token in tokens[iteration]])
        made.extend(tokens[i] for i in range(prompt, len(item.plan.schedule)) if i in tokens)
        return [
            {"request": request.request, "position": position, "token": values[row]}
            for row, request in enumerate(item.requests)
            for position, values in enumerate(made[: request.output_tokens])
        ]

    def _intervals(self) -> list[dict[str, Any]]:
        predicted = {
            (row["route"], row["program"]): row["simulated_us"] or row["interval_us"]
            for row in self.plan.facts["prediction"]["intervals"]
        }
        found = completions(self.outcome.spans)
        rows = []
        for model in self.models:
            own = [item for item in found if item.route == model.route]
            for program in model.programs:
                interval = steady(own, program.name, model.slots)
                rows.append(
                    {
                        "route": model.route,
                        "program": program.name,
                        "interval_us": interval.interval_us,
                        "planned_us": float(predicted.get((model.route, program.name), 0.0)),
                        "iterations": interval.iterations,
                    }
                )
        return rows

    def _facts(
        self,
        output: Path,
        info: Mapping[str, Any],
        requests: Sequence[Mapping[str, Any]],
        finished: Sequence[Mapping[str, Any]],
    ) -> Facts:
        gaps = [
            (row["end_us"] - row["first_token_us"]) / (row["tokens"] - 1)
            for row in finished
            if row["tokens"] > 1
        ]
        crossings = sum(span.kind == "send" for span in self.outcome.spans)
        values: dict[str, Any] = {
            "run": str(output),
            "backend": self.backend,
            "status": info["status"],
            "strategy": self.plan.facts["strategy"],
            "batches": len(self.outcome.finished),
            "requests": len(finished),
            "tokens": sum(row["tokens"] for row in finished),
            "transfers": crossings,
            "verified": self.verified,
            "duration_ms": info["duration_us"] / 1e3,
            "tokens_per_s": info["tokens_per_s"],
            "planned_tokens_per_s": self.plan.facts["prediction"]["tokens_per_s"],
            "time_per_token_us": sum(gaps) / len(gaps) if gaps else 0.0,
            "machine": self.machine,
        }
        rows = tuple(
            (
                row["route"],
                row["program"],
                row["interval_us"] if row["iterations"] else None,
                row["planned_us"] or None,
                row["interval_us"] / row["planned_us"] if row["iterations"] and row["planned_us"] else None,
                row["iterations"],
            )
            for row in info["intervals"]
        )
        busy: dict[str, float] = defaultdict(float)
        for span in self.outcome.spans:
            if span.kind in ("compute", "move"):
                busy[span.device] += span.end_us - span.start_us
        length = max((span.end_us for span in self.outcome.spans), default=0.0)
        return Facts(
            "simulated run" if self.backend == "simulate" else "run",
            values,
            (
                FactTable(
                    "steady intervals",
                    ("route", "program", "interval_us", "planned_us", "of_planned", "iterations"),
                    rows,
                ),
                FactTable(
                    "devices",
                    ("device", "computing"),
                    tuple((device, time / length) for device, time in sorted(busy.items())),
                ),
            ),
        )
