"""Between the IR and the trace artifact's tables, both ways, without loss."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from tessera_core.program.boxes import Box
from tessera_core.program.ir import (
    Buffer,
    Guard,
    IoBinding,
    Kernel,
    Op,
    Operand,
    Program,
    State,
    StreamWait,
    TensorRef,
    Trace,
    Weight,
)
from tessera_formats.bundle import Bundle
from tessera_formats.errors import ArtifactError
from tessera_formats.trace import TRACE, read_trace, write_trace


def load_trace(path: Path | str) -> Trace:
    """Read a trace artifact into the IR; raises the errors of :func:`tessera_formats.trace.read_trace`."""
    return trace_from_bundle(read_trace(path))


def trace_from_bundle(bundle: Bundle) -> Trace:
    """The IR of an opened trace."""
    rows = {schema.name: bundle.table(schema.name).to_pylist() for schema in TRACE.tables}
    operands: dict[tuple[int, int], list[Operand]] = defaultdict(list)
    for row in rows["operands"]:
        operands[row["program"], row["op"]].append(
            Operand(
                tensor=row["tensor"],
                mode=row["mode"],
                must=row["must"],
                valid_for=row["valid_for"],
                evidence=row["evidence"],
                boxes=boxes_from_rows(row["boxes"]),
            )
        )
    ops: dict[int, list[Op]] = defaultdict(list)
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row in sorted(rows["ops"], key=lambda r: (r["program"], r["op"])):
        members[row["program"], row["kernel"]].append(row["op"])
        ops[row["program"]].append(
            Op(
                id=row["op"],
                kernel=row["kernel"],
                target=row["target"],
                schema=row["schema"],
                arguments=_decode(bundle, row["arguments"]),
                inputs=tuple(row["inputs"]),
                outputs=tuple(row["outputs"]),
                operands=tuple(operands[row["program"], row["op"]]),
                stream=row["stream"],
            )
        )
    kernels: dict[int, list[Kernel]] = defaultdict(list)
    for row in sorted(rows["kernels"], key=lambda r: (r["program"], r["kernel"])):
        fields = {key: value for key, value in row.items() if key not in ("program", "kernel")}
        kernels[row["program"]].append(
            Kernel(id=row["kernel"], ops=tuple(members[row["program"], row["kernel"]]), **fields)
        )
    io: dict[int, list[IoBinding]] = defaultdict(list)
    for row in rows["io"]:
        io[row.pop("program")].append(IoBinding(**row))
    guards: dict[int, list[Guard]] = defaultdict(list)
    for row in rows["guards"]:
        guards[row.pop("program")].append(Guard(**row))
    waits: dict[int, list[StreamWait]] = defaultdict(list)
    for row in rows["stream_waits"]:
        waits[row.pop("program")].append(StreamWait(**row))
    programs = tuple(
        Program(
            id=row["program"],
            name=row["name"],
            phase=row["phase"],
            batch=row["batch"],
            context=row["context"],
            ops=tuple(ops[row["program"]]),
            kernels=tuple(kernels[row["program"]]),
            io=tuple(io[row["program"]]),
            guards=tuple(guards[row["program"]]),
            stream_waits=tuple(waits[row["program"]]),
        )
        for row in sorted(rows["programs"], key=lambda r: int(r["program"]))
    )
    trace = Trace(
        info=bundle.info,
        programs=programs,
        buffers=tuple(
            Buffer(id=r["buffer"], **{k: v for k, v in r.items() if k != "buffer"})
            for r in sorted(rows["buffers"], key=lambda r: int(r["buffer"]))
        ),
        tensors=tuple(
            TensorRef(
                id=r["tensor"],
                buffer=r["buffer"],
                dtype=r["dtype"],
                shape=tuple(r["shape"]),
                stride=tuple(r["stride"]),
                offset=r["offset"],
            )
            for r in sorted(rows["tensors"], key=lambda r: int(r["tensor"]))
        ),
        weights=tuple(
            Weight(
                name=r["name"],
                aliases=tuple(r["aliases"]),
                buffer=r["buffer"],
                tensor=r["tensor"],
                init=_decode(bundle, r["init"]),
            )
            for r in rows["weights"]
        ),
        states=tuple(State(**{**r, "init": _decode(bundle, r["init"])}) for r in rows["states"]),
        constants=bundle.file("data.safetensors"),
    )
    _check_dense(bundle, trace)
    return trace


def save_trace(path: Path | str, trace: Trace) -> None:
    """Write the IR as a trace artifact; the program digest is computed, ``info``'s is ignored."""
    info = {key: value for key, value in trace.info.items() if key != "program_digest"}
    write_trace(path, info, trace_tables(trace), trace.constants)


def trace_tables(trace: Trace) -> dict[str, pa.Table]:
    """The trace artifact's tables."""
    rows: dict[str, list[dict[str, Any]]] = {schema.name: [] for schema in TRACE.tables}
    for program in trace.programs:
        rows["programs"].append(
            {
                "program": program.id,
                "name": program.name,
                "phase": program.phase,
                "batch": program.batch,
                "context": program.context,
            }
        )
        for kernel in program.kernels:
            rows["kernels"].append(
                {
                    "program": program.id,
                    "kernel": kernel.id,
                    **_fields(kernel, ("signature", "name", "kind", "flops", "read_bytes", "written_bytes")),
                    **_fields(kernel, ("state_writer", "dtype", "layer", "group")),
                }
            )
        for op in program.ops:
            rows["ops"].append(
                {
                    "program": program.id,
                    "op": op.id,
                    **_fields(op, ("kernel", "target", "schema", "inputs", "outputs", "stream")),
                    "arguments": canonical_json(op.arguments),
                }
            )
            for operand in op.operands:
                rows["operands"].append(
                    {
                        "program": program.id,
                        "op": op.id,
                        **_fields(operand, ("tensor", "mode", "must", "valid_for", "evidence")),
                        "boxes": boxes_to_rows(operand.boxes),
                    }
                )
        for binding in program.io:
            rows["io"].append(
                {"program": program.id, **_fields(binding, ("role", "name", "tensor", "feeds"))}
            )
        for wait in program.stream_waits:
            rows["stream_waits"].append(
                {"program": program.id, "source": wait.source, "destination": wait.destination}
            )
        for guard in program.guards:
            rows["guards"].append(
                {
                    "program": program.id,
                    **_fields(guard, ("subject", "index", "comparison", "value", "reason")),
                }
            )
    rows["buffers"] = [
        {"buffer": b.id, **_fields(b, ("program", "kind", "bytes", "name", "real"))} for b in trace.buffers
    ]
    rows["tensors"] = [
        {"tensor": t.id, **_fields(t, ("buffer", "dtype", "shape", "stride", "offset"))}
        for t in trace.tensors
    ]
    rows["weights"] = [
        {**_fields(w, ("name", "aliases", "buffer", "tensor")), "init": canonical_json(w.init)}
        for w in trace.weights
    ]
    rows["states"] = [
        {**_fields(s, ("name", "batch_axis", "sequence_axis")), "init": canonical_json(s.init)}
        for s in trace.states
    ]
    return {schema.name: schema.build(rows[schema.name]) for schema in TRACE.tables}


def boxes_to_rows(boxes: Iterable[Box] | None) -> list[dict[str, Any]] | None:
    """Boxes as the Arrow struct that artifacts hold; None stays None."""
    if boxes is None:
        return None
    return [
        {
            "start": box.start,
            "counts": [count for count, _ in box.dims],
            "strides": [stride for _, stride in box.dims],
            "run": box.run,
        }
        for box in boxes
    ]


def boxes_from_rows(rows: Sequence[Mapping[str, Any]] | None) -> tuple[Box, ...] | None:
    """Boxes from the Arrow struct (or the plan's records); None stays None."""
    if rows is None:
        return None
    return tuple(
        Box.of(row["start"], zip(row["counts"], row["strides"], strict=True), row["run"]) for row in rows
    )


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces; NaN and infinities are kept as JSON extensions."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _decode(bundle: Bundle, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as problem:
        raise ArtifactError(f"{bundle.path}: holds unreadable JSON ({problem}); trace again") from problem


def _fields(value: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _check_dense(bundle: Bundle, trace: Trace) -> None:
    """Ids index their tuples everywhere, so they must be dense."""
    sequences: list[tuple[str, Sequence[Any]]] = [
        ("programs", trace.programs),
        ("buffers", trace.buffers),
        ("tensors", trace.tensors),
    ]
    for program in trace.programs:
        sequences += [
            (f"ops of {program.name}", program.ops),
            (f"kernels of {program.name}", program.kernels),
        ]
    for name, items in sequences:
        if any(item.id != index for index, item in enumerate(items)):
            raise ArtifactError(f"{bundle.path}: ids of {name} are not 0, 1, 2, ...; trace again")
