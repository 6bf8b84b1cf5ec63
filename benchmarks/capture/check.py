"""Capture one subject, rebuild its graphs from what is stored, compare, reconcile: its results and bars."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import Bar
from benchmarks.capture import DEVICE
from benchmarks.capture.iteration import (
    compare,
    memory_of,
    rebuilt,
    rerouted,
    results_of,
    run_both,
    run_groups,
    values,
)
from benchmarks.capture.subjects import Subject
from benchmarks.capture.timing import timed
from tessera_core.program.ir import Program, Trace
from tessera_core.program.store import load_trace, trace_tables
from tessera_core.trace.capture.addresses import word_offsets
from tessera_core.trace.capture.driver import allocation_of
from tessera_core.trace.capture.rebuild import load_ptx
from tessera_core.trace.capture.reconcile import place_model, reconcile_model
from tessera_core.trace.capture.session import Session
from tessera_core.trace.capture.stage import CaptureStage, capture_values
from tessera_core.trace.fake import new_fake_mode
from tessera_formats.errors import TesseraError
from tessera_formats.trace import write_trace

TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
"""Relative error (Euclidean norm) of outputs and state against eager execution: other kernels sum in another
order, and eager bfloat16 rounds after every op where a fused kernel rounds once."""
REROUTED_BAR = 0.1
"""In bfloat16 a router's scores differ by about a hundredth of their spread between two orders of rounding, and a
token whose fourth and fifth experts are closer than that gets another one: its results are right and different."""
OVERHEAD_BAR = 1.02

Rows = dict[str, list[dict[str, Any]]]


def check(subject: Subject, save: Path | None) -> tuple[dict[str, Any], list[Bar]]:
    """All findings of one subject; ``save``: a folder that keeps its trace."""
    name = subject.name
    started = time.perf_counter()
    trace = subject.trace()
    target, tables, session, captured = CaptureStage(device=DEVICE).capture(trace)
    found: dict[str, Any] = capture_values(target, tables, captured, session)
    found["capture_seconds"] = round(time.perf_counter() - started, 1)
    if save is not None:
        # First of all, so that a check that fails can be looked into.
        everything = {
            **trace_tables(trace),
            **{f"targets/{target}/{key}": table for key, table in tables.items()},
        }
        info = {key: value for key, value in trace.info.items() if key != "program_digest"}
        write_trace(save / f"{name}.trace", info, everything, trace.constants)
        load_trace(save / f"{name}.trace")
    slowest = sorted((round(seconds, 1) for seconds in session.seconds.values()), reverse=True)
    found["slowest_signatures_seconds"] = slowest[:5]
    unresolved = _unresolved(captured)
    out_of_reach = found["reads_out_of_reach"]
    bars = [
        Bar(f"{name}: pointers of launches left unresolved", unresolved, "= 0", unresolved == 0),
        Bar(
            f"{name}: buffers that the schema reads and no launch reaches",
            out_of_reach,
            "= 0",
            out_of_reach == 0,
        ),
    ]
    rows = {key: table.to_pylist() for key, table in tables.items()}
    eager = Session(trace=trace, device=DEVICE, compiled=False)
    from_ptx = {**session.handles, **load_ptx(rows["modules"], _entries(rows))}
    for program in trace.programs:
        found[program.name] = _check_program(trace, program, session, eager, rows, from_ptx)
        bars += _program_bars(f"{name} {program.name}", found[program.name], str(trace.info["dtype"]))
        gc.collect()
        torch.cuda.empty_cache()
    try:
        model = subject.model(new_fake_mode())
        place_model(model, DEVICE)
        done = reconcile_model(trace, model, DEVICE)
        found["reconciled"] = {item.program: item.launches for item in done}
        del model
    except TesseraError as problem:
        found["reconciled"] = str(problem)
    explained = isinstance(found["reconciled"], dict)
    bars.append(
        Bar(f"{name}: every eager launch is explained by a recorded op", explained, "= true", explained)
    )
    if subject.timed:
        for program in trace.programs:
            times, bar = _timing(subject, trace, program, session)
            found[f"{program.name} us"] = times
            bars.append(bar)
    return found, bars


def _check_program(
    trace: Trace, program: Program, session: Session, eager: Session, rows: Rows, from_ptx: dict[Any, int]
) -> dict[str, Any]:
    """One iteration by every way, against the compiled groups."""
    given = values(trace, program)
    reference = memory_of(trace, given)
    run_groups(session, program, reference)
    wanted = results_of(trace, program, reference)
    again = memory_of(trace, given)
    by_kernel = run_both(session, eager, program, again)
    ops = memory_of(trace, given)
    run_groups(eager, program, ops)
    built = rebuilt(trace, program, rows, dict(session.handles), given)
    ptx = rebuilt(trace, program, rows, from_ptx, given)
    return {
        "groups_again": compare(results_of(trace, program, again), wanted),
        "rebuilt": compare(results_of(trace, program, built), wanted),
        "rebuilt_from_ptx_text": compare(results_of(trace, program, ptx), wanted),
        "eager": compare(results_of(trace, program, ops), wanted),
        "eager_by_kernel": by_kernel,
        "routing": rerouted(trace, program, ops, reference),
    }


def _program_bars(where: str, checks: dict[str, Any], dtype: str) -> list[Bar]:
    equal, limit = checks["rebuilt"]["equal"], TOLERANCE[dtype]
    kernel, error = checks["eager_by_kernel"]["relative_error"], checks["eager"]["relative_error"]
    bars = [
        Bar(f"{where}: rebuilt graph equals the compiled groups bit for bit", equal, "= true", equal),
        Bar(
            f"{where}: relative error of a kernel run eagerly on the same values",
            kernel,
            f"<= {limit}",
            kernel <= limit,
        ),
    ]
    routing = checks["routing"]
    if routing is None or dtype == "float32":
        name = f"{where}: relative error of eager execution"
        bars.append(Bar(name, error, f"<= {limit}", error <= limit))
    else:
        share = round(routing["rerouted"] / routing["tokens"], 4)
        name = f"{where}: share of tokens that eager rounding sends to other experts"
        bars.append(Bar(name, share, f"<= {REROUTED_BAR}", share <= REROUTED_BAR))
    return bars


def _timing(
    subject: Subject, trace: Trace, program: Program, session: Session
) -> tuple[dict[str, float], Bar]:
    try:
        times = timed(trace, program, session, lambda: subject.model(new_fake_mode()))
    except Exception as problem:
        times = {}
        print(f"timing {program.name}: {type(problem).__name__}: {problem}"[:2000], file=sys.stderr)
    ratio = round(times["groups"] / times["model"], 4) if "model" in times else None
    return times, Bar(
        f"{subject.name} {program.name}: groups over torch.compile of the model",
        ratio,
        f"<= {OVERHEAD_BAR}",
        ratio is not None and ratio <= OVERHEAD_BAR,
    )


def _entries(rows: Rows) -> dict[str, list[str]]:
    """Functions that are launched from each module."""
    found: dict[str, list[str]] = {}
    for row in rows["launches"]:
        if row["module"] is not None and row["function"] not in found.setdefault(row["module"], []):
            found[row["module"]].append(row["function"])
    return found


def _unresolved(captured: Sequence[Any]) -> int:
    """Words that still lie in the range of device addresses after resolution, by asking the driver."""
    count = 0
    for item in captured:
        for launch, block in zip(item.launches, item.parameters):
            for offset in word_offsets(len(block), launch.layout):
                word = int.from_bytes(block[offset : offset + 8], "little")
                count += word > 1 << 32 and allocation_of(word) is not None
    return count
