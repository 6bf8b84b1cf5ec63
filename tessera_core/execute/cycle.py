"""Whole batches of requests, one after another through a route: how long one takes alone, and how often one leaves
a full pipeline.

A batch runs so many iterations of each program (its *cycle*), and its slot then takes the next. Slots enter one
after the other, so that some prefill while others decode. A route of one program has no cycle but the iteration: it
repeats that without end, its outputs feeding its inputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tessera_core.execute.segments import RouteModel
from tessera_core.execute.simulator import BatchPlan, completions, simulate, steady_interval

LARGEST_SPANS = 60_000
"""Spans that the simulation of a full pipeline may take, one to four seconds: rates are brought down to that. A plan
of Llama-3-8B's prefill and decode with 252 crossings then comes within 0.2% of all its spans; at 24,000, 15% off."""
WARM, MEASURED, COOL = 2, 3, 1
"""Batches per slot: while the pipeline fills, that are measured, and while it drains."""
COUNTED = 12
"""Iterations of a batch that are simulated one by one where it has the devices to itself; further ones follow at the
pace at which its program repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Of a full pipeline, in microseconds: between two batches that leave it, and between a request's tokens (0: it
    gets one at most)."""

    cycle_us: float
    token_us: float


def batch_us(model: RouteModel, rates: Sequence[int], repeat_us: Sequence[float]) -> float:
    """What a slot's batch takes where no other slot is in its way.

    ``repeat_us``: by program, how fast its iterations follow each other in one slot alone.
    """
    if len(model.programs) == 1:
        return rates[0] * repeat_us[0]
    counted = tuple(min(rate, COUNTED) for rate in rates)
    batch = BatchPlan(batch=0, route=0, arrival_us=0.0, iterations=counted)
    alone = completions(simulate([replace(model, slots=1)], [batch]))
    further = zip(rates, counted, repeat_us, strict=True)
    return max(item.end_us for item in alone) + sum((rate - few) * time for rate, few, time in further)


def simulated_rates(model: RouteModel, rates: Sequence[int]) -> tuple[int, ...]:
    """``rates`` brought down together to what can be simulated, each to no less than one iteration."""
    if len(model.programs) == 1:
        return tuple(rates)
    spans = [
        sum(len(segments) for segments in program.segments.values())
        + sum(move.program == index for move in model.transfers)
        for index, program in enumerate(model.programs)
    ]
    batches = model.slots * (WARM + MEASURED + COOL)
    all_spans = batches * sum(rate * count for rate, count in zip(rates, spans, strict=True))
    share = min(1.0, LARGEST_SPANS / max(all_spans, 1))
    return tuple(max(1, round(rate * share)) if rate else 0 for rate in rates)


def steady_pace(model: RouteModel, rates: Sequence[int], apart_us: float) -> Pace:
    """How often batches of ``rates`` leave a full pipeline, whose slots begin ``apart_us`` after each other."""
    if len(model.programs) == 1:
        interval = steady_interval(model, model.programs[0].name)
        return Pace(cycle_us=rates[0] * interval, token_us=interval * model.slots)
    slots = model.slots
    batches = [
        BatchPlan(batch=b, route=0, arrival_us=min(b, slots - 1) * apart_us, iterations=tuple(rates))
        for b in range(slots * (WARM + MEASURED + COOL))
    ]
    ends: dict[int, list[float]] = defaultdict(list)
    for item in completions(simulate([model], batches)):
        ends[item.batch].append(item.end_us)
    finished = sorted(ends.values(), key=lambda times: times[-1])
    first = WARM * slots - 1
    measured = finished[first : first + MEASURED * slots + 1]
    cycle_us = (measured[-1][-1] - measured[0][-1]) / (MEASURED * slots)
    prompts = max(sum(rates[:-1]), 1)
    if not rates[-1]:
        return Pace(cycle_us=cycle_us, token_us=0.0)
    decoding = [(times[-1] - times[prompts - 1]) / rates[-1] for times in measured]
    return Pace(cycle_us=cycle_us, token_us=sum(decoding) / len(decoding))
