"""A run's spans as a Chrome trace, which Perfetto loads: one process per device, arrows for transfers."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from tessera_core.execute.segments import RouteModel
from tessera_core.execute.simulator import Span

_THREADS: Mapping[str, int] = {"compute": 1, "move": 1, "receive": 1, "send": 2}
_THREAD_NAMES = {1: "compute", 2: "send"}


def perfetto_json(models: Sequence[RouteModel], spans: Sequence[Span]) -> bytes:
    """The trace's bytes; times in microseconds, as the format wants them."""
    devices = list(dict.fromkeys(device for model in models for device in model.devices))
    events: list[dict[str, Any]] = []
    for number, device in enumerate(devices):
        events.append({"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": device}})
        for thread, name in _THREAD_NAMES.items():
            events.append(
                {"ph": "M", "name": "thread_name", "pid": number, "tid": thread, "args": {"name": name}}
            )
    for span in spans:
        events.append(
            {
                "ph": "X",
                "name": _name(span),
                "cat": span.kind,
                "pid": devices.index(span.device),
                "tid": _THREADS[span.kind],
                "ts": span.start_us,
                "dur": span.end_us - span.start_us,
                "args": {
                    "route": span.route,
                    "slot": span.slot,
                    "batch": span.batch,
                    "program": span.program,
                    "iteration": span.iteration,
                    "kernels": [span.first_kernel, span.last_kernel],
                    "bytes": span.bytes,
                },
            }
        )
    events.extend(_flows(models, spans, devices))
    document = {"displayTimeUnit": "ms", "traceEvents": events}
    return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()


def _name(span: Span) -> str:
    phase = span.program.partition(":")[0]
    if span.kind == "compute":
        return f"{phase} b{span.batch} i{span.iteration} k{span.first_kernel}-{span.last_kernel}"
    return f"{span.kind} {phase} b{span.batch} i{span.iteration}"


def _flows(
    models: Sequence[RouteModel], spans: Sequence[Span], devices: Sequence[str]
) -> list[dict[str, Any]]:
    """An arrow from each send to the segment that uses what it sent."""
    computing = {
        (span.device, span.batch, span.iteration, span.segment): span
        for span in spans
        if span.kind == "compute"
    }
    lengths: dict[int, int] = defaultdict(int)
    sent: dict[tuple[str, int, int, int], list[Span]] = defaultdict(list)
    for span in spans:
        lengths[span.batch] = max(lengths[span.batch], span.iteration)
        if span.kind == "send":
            sent[span.device, span.batch, span.iteration, span.segment].append(span)
    events: list[dict[str, Any]] = []
    by_route = {model.route: model for model in models}
    for (device, batch, iteration, number), sends in sent.items():
        model = by_route[sends[0].route]
        program = next(item for item in model.programs if item.name == sends[0].program)
        transfers = [model.transfers[index] for index in program.segments[device][number].sends]
        if iteration == lengths[batch]:
            transfers = [move for move in transfers if move.used]
        for span, move in zip(sends, transfers, strict=False):
            later = iteration if move.used else iteration + 1
            target = model.programs[program.index if move.used else program.target]
            user = next(
                (
                    segment.index
                    for segment in target.segments.get(move.transfer.destination, ())
                    if move.index in segment.receives or move.feeds in segment.fed
                ),
                None,
            )
            arrival = computing.get(
                (move.transfer.destination, batch, later, user if user is not None else -1)
            )
            if arrival is None:
                continue
            flow = {"cat": "transfer", "name": f"buffer {move.transfer.buffer}", "id": len(events)}
            events.append({**flow, "ph": "s", "pid": devices.index(device), "tid": 2, "ts": span.start_us})
            events.append(
                {
                    **flow,
                    "ph": "f",
                    "bp": "e",
                    "pid": devices.index(arrival.device),
                    "tid": 1,
                    "ts": arrival.start_us,
                }
            )
    return events
