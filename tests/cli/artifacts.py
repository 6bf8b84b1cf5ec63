"""A small hand-made set of artifacts of one program, for tests that read and damage them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.numpy import save

from tessera_core.program.ir import (
    Buffer,
    Guard,
    IoBinding,
    Kernel,
    Op,
    Operand,
    Program,
    State,
    TensorRef,
    Trace,
    Weight,
)
from tessera_core.program.store import save_trace
from tessera_formats.adapt import DECISIONS, WINDOWS, write_adapt
from tessera_formats.adapt import REQUESTS as ADAPT_REQUESTS
from tessera_formats.deps import (
    ACCESSES,
    BLOCK_FOOTPRINTS,
    CHAINS,
    COVERAGE,
    EDGES,
    SPLITS,
    read_deps,
    write_deps,
)
from tessera_formats.plan import write_plan
from tessera_formats.profile import TIMES, write_profile
from tessera_formats.run import OUTPUTS, REQUESTS, SPANS, write_run
from tessera_formats.trace import read_trace

PREFILL, DECODE = "prefill:batch=1,context=4", "decode:batch=2,context=64"


def synthetic_trace(seed: int = 0) -> Trace:
    """Two programs of two kernels: a product with the weight,
    then a pointwise kernel that makes the output."""
    buffers = [Buffer(id=0, program=None, kind="weight", bytes=64, name="w", real=True)]
    tensors = [TensorRef(id=0, buffer=0, dtype="float32", shape=(4, 4), stride=(4, 1), offset=0)]
    programs = []
    for number, (name, phase, batch, context, tokens) in enumerate(
        [(PREFILL, "prefill", 1, 4, 4), (DECODE, "decode", 2, 64, 1)]
    ):
        first = len(buffers)
        rows = batch * tokens
        for offset, (kind, label, dtype, shape) in enumerate(
            [
                ("input", "tokens", "int64", (batch, tokens)),
                ("activation", "", "float32", (rows, 4)),
                ("output", "next_token", "int64", (batch, 1)),
                ("state", "cache", "float32", (batch, context, 4)),
            ]
        ):
            stride, step = [], 1
            for extent in reversed(shape):
                stride.insert(0, step)
                step *= extent
            size = step * (8 if dtype == "int64" else 4)
            buffers.append(
                Buffer(id=first + offset, program=number, kind=kind, bytes=size, name=label, real=True)
            )
            tensors.append(
                TensorRef(
                    id=first + offset, buffer=first + offset, dtype=dtype, shape=shape,
                    stride=tuple(stride), offset=0,
                )
            )  # fmt: skip
        tokens_in, hidden, out, cache = range(first, first + 4)
        programs.append(
            Program(
                id=number, name=name, phase=phase, batch=batch, context=context,
                ops=(
                    _op(0, 0, "aten.mm.default", (tokens_in, 0), (hidden,)),
                    _op(1, 1, "aten.copy_.default", (cache, hidden), (cache,)),
                    _op(2, 2, "aten.argmax.default", (hidden, cache), (out,)),
                ),
                kernels=(
                    _kernel(0, "mm", "matmul", "none"),
                    _kernel(1, "append", "copy", "copy"),
                    _kernel(2, "argmax", "reduction", "none"),
                ),
                io=(
                    IoBinding(role="input", name="tokens", tensor=tokens_in, feeds=None),
                    IoBinding(role="output", name="next_token", tensor=out, feeds="tokens"),
                    IoBinding(role="state", name="cache", tensor=cache, feeds=None),
                ),
                guards=(
                    Guard(
                        subject="total_tokens", index=None, comparison="le",
                        value=context,
                        reason="the cache holds no more",
                    ),
                ) if number else (),
            )
        )  # fmt: skip
    return Trace(
        info={
            "program_digest": "", "model": "synthetic", "source": "catalogue", "seed": seed,
            "dtype": "float32",
            "fake": False, "replayable": False, "notes": [], "versions": {"torch": "0"},
        },
        programs=tuple(programs),
        buffers=tuple(buffers),
        tensors=tuple(tensors),
        weights=(Weight(name="w", aliases=(), buffer=0, tensor=0, init={"kind": "normal", "mean": 0.0,
        "std": 0.02 + seed}),),
        states=(State(name="cache", batch_axis=0, sequence_axis=1, init={"kind": "zeros"}),),
        constants=save({}),
    )  # fmt: skip


def _op(number: int, kernel: int, target: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Op:
    reads = tuple(
        Operand(tensor=t, mode="read", must=False, valid_for="shapes", evidence="schema", boxes=None)
        for t in inputs
    )
    writes = tuple(
        Operand(tensor=t, mode="write", must=True, valid_for="shapes", evidence="schema", boxes=None)
        for t in outputs
    )
    arguments = {"args": [{"tensor": t} for t in inputs], "kwargs": {}}
    return Op(
        id=number, kernel=kernel, target=target, schema=target, arguments=arguments,
        inputs=inputs, outputs=outputs, operands=(*reads, *writes),
    )  # fmt: skip


def _kernel(number: int, name: str, kind: str, writer: str) -> Kernel:
    return Kernel(
        id=number, signature=f"signature-{name}", name=name, kind=kind, flops=1000 * (number == 0),
        read_bytes=96,
        written_bytes=32, state_writer=writer, dtype="float32", layer=None, ops=(number,),
    )  # fmt: skip


def write_trace_and_deps(folder: Path, seed: int = 0) -> str:
    """``x.trace`` and ``x.deps`` in ``folder``; returns the program digest."""
    save_trace(folder / "x.trace", synthetic_trace(seed))
    digest = str(read_trace(folder / "x.trace").info["program_digest"])
    edges, accesses = [], []
    for program in synthetic_trace(seed).programs:
        for op in program.ops:
            for operand in op.operands:
                accesses.append(
                    {
                        "target": "ops", "program": program.id, "kernel": op.kernel, "part": "whole",
                        "buffer": operand.tensor, "mode": operand.mode, "must": operand.must, "boxes": None,
                        "evidence": "schema", "precision": "exact", "valid_for": "shapes", "detail": "", "launch": None,
                    }
                )  # fmt: skip
        hidden, cache = program.ops[0].outputs[0], program.ops[1].outputs[0]
        for source, destination, buffer in ((0, 1, hidden), (0, 2, hidden), (1, 2, cache)):
            edges.append(
                {
                    "target": "ops", "program": program.id, "source": source, "destination": destination,
                    "buffer": buffer, "hazard": "RAW", "boxes": None, "must": True, "evidence": "schema",
                }
            )  # fmt: skip
    coverage = [
        {"target": "ops", "evidence": "schema", "precision": "exact", "accesses": len(accesses),
        "kernels": 6, "edges": 6}
    ]  # fmt: skip
    write_deps(
        folder / "x.deps",
        {"program_digest": digest, "targets": ["ops"], "modules": [], "unknown_opcodes": []},
        {
            "accesses": ACCESSES.build(accesses),
            "edges": EDGES.build(edges),
            "chains": CHAINS.build([]),
            "coverage": COVERAGE.build(coverage),
            "block_footprints": BLOCK_FOOTPRINTS.empty(),
            "splits": SPLITS.empty(),
        },
    )
    return digest


def plan_document(
    digest: str, deps_digest: str, *, times: Mapping[str, float], slots: int, placed: str
) -> dict[str, Any]:
    """A plan with one route, all kernels on ``placed`` (a device),
    one iteration taking ``times`` by program."""
    cycle = 2 * times[PREFILL] + 7 * times[DECODE]
    fractions = (0.5, 0.25, 0.25)
    return {
        "program_digest": digest, "deps_digest": deps_digest, "profile_digest": "sha256:0",
        "cluster_digest": "sha256:0",
        "policy": "throughput", "strategy": "single", "requested": "single", "condition": "alone",
        "targets": ["ops"],
        "device": [{"name": n, "type": "cpu-1thread", "capacity_bytes": 10**9,
        "memory_domain": "host"} for n in ("cpu0", "cpu1")],
        "route": [{"route": 0, "share": 1.0, "batch": 2, "slots": slots, "programs": [PREFILL, DECODE],
        "rates": [2, 7]}],
        "prediction": {
            "objective_us": 1.0, "lower_bound_us": 1.0, "gap": 0.0, "tokens_per_s": 10.0,
            "time_per_token_us": 1.0,
            "measured_share": 1.0, "silicon_share": 0.0, "modelled_share": 0.0, "probability_best": 0.0,
            "intervals": [
                {"route": 0, "program": p, "resource_us": t, "latency_us": t, "interval_us": t,
                "simulated_us": t}
                for p, t in times.items()
            ],
            "cycles": [
                {"route": 0, "resource_us": cycle, "latency_us": cycle, "interval_us": cycle,
                "simulated_us": cycle, "token_us": times[DECODE]}
            ],
        },
        "compared": [
            {
                "strategy": "single", "feasible": True, "chosen": True, "reason": f"all on {placed}",
                "batch": 2,
                "slots": slots, "devices": 1, "interval_us": times[DECODE], "latency_us": times[DECODE],
                "tokens_per_s": 10.0, "time_per_token_us": 1.0,
                "measured_share": 1.0, "silicon_share": 0.0, "modelled_share": 0.0,
                "probability_best": 0.0,
            }
        ],
        "memory": [
            {"device": placed, "weight_bytes": 64, "state_bytes": 256, "activation_bytes": 99,
            "capacity_bytes": 10**9}
        ],
        "home": [{"route": 0, "state": "cache", "device": placed}],
        "assignment": [
            {"route": 0, "program": p, "kernel": k, "part": "whole", "device": placed,
            "time_us": t * fractions[k]}
            for p, t in times.items() for k in range(3)
        ],
        "transfer": [],
    }  # fmt: skip


def write_all(folder: Path, seed: int = 0) -> None:
    """Every kind of artifact: x.trace, x.deps, x.profile.arrow, x.plan.toml, x.run, x.adapt, c.toml,
    w.toml."""
    digest = write_trace_and_deps(folder, seed)
    rows = [
        {
            "signature": f"signature-{name}", "part": "whole", "device_type": "cpu-1thread",
            "condition": "alone",
            "cache": "sequence", "median_us": 10.0 + n, "p10_us": 9.0, "p90_us": 12.0, "low_us": 9.5,
            "high_us": 11.5,
            "samples": 50, "flops": 1000, "bytes": 128, "source": "measured", "detail": "",
            "load": "", "dtype": "float32", "hardware": "some CPU", "dated": "2026-01-01", "table": "",
            "distance": 0.0,
        }
        for n, name in enumerate(("mm", "append", "argmax"))
    ]  # fmt: skip
    device = {
        "device_type": "cpu-1thread", "hardware": "some CPU", "threads": 1, "overhead_us": 2.0,
        "date": "2026-01-01",
        "source": "measured",
    }  # fmt: skip
    link = {
        "source": "cpu-1thread", "destination": "cpu-1thread", "latency_us": 20.0, "gbit_per_s": 40.0,
        "send_us": 1.0,
        "receive_us": 1.0, "occupies_sender": True, "samples": 100, "residual": 0.01, "origin": "measured",
        "transport": "shared-memory",
    }  # fmt: skip
    header = {"program_digest": digest, "links": [link], "devices": [device]}
    write_profile(folder / "x.profile.arrow", header, TIMES.build(rows))
    deps_digest = read_deps(folder / "x.deps").digest
    plan = plan_document(
        digest, deps_digest, times={PREFILL: 100_000.0, DECODE: 10_000.0}, slots=1, placed="cpu0"
    )
    write_plan(folder / "x.plan.toml", plan)
    span = {
        "device": "cpu0", "kind": "compute", "route": 0, "slot": 0, "batch": 0, "program": DECODE,
        "iteration": 1,
        "segment": 0, "first_kernel": 0, "last_kernel": 2, "bytes": 0, "start_us": 10.0, "end_us": 60.0,
    }  # fmt: skip
    request = {
        "request": 0, "route": 0, "batch": 0, "slot": 0, "status": "finished", "tokens": 2, "arrival_us": 0.0,
        "first_token_us": 40.0, "end_us": 100.0,
    }  # fmt: skip
    write_run(
        folder / "x.run",
        {
            "program_digest": digest, "plan_digest": "sha256:0", "backend": "simulate",
            "status": "finished", "lost": "",
            "verified": "not checked", "duration_us": 100.0, "tokens_per_s": 20000.0, "machine": "none",
            "intervals": [
                {"route": 0, "program": DECODE, "interval_us": 55.0, "planned_us": 50.0, "iterations": 9}
            ],
        },
        {"spans": SPANS.build([span]), "requests": REQUESTS.build([request]), "outputs": OUTPUTS.build([])},
        {"perfetto.json": json.dumps({"traceEvents": []}).encode()},
    )  # fmt: skip
    window = {
        "window": 0, "start_us": 0.0, "end_us": 300000.0, "plan": "x", "arrivals": 2, "completions": 1,
        "queued": 0,
        "running": 1, "pressure": 1.75, "mean_latency_us": 120000.0,
    }  # fmt: skip
    decision = {
        "decision": 0, "window": 0, "at_us": 300000.0, "before": "x", "after": "y", "pressure": 1.75,
        "reason": "pressure 1.75 above 1.5",
    }  # fmt: skip
    adapted = {
        "request": 0, "plan": "x", "arrival_us": 0.0, "start_us": 0.0, "first_token_us": 1.0,
        "end_us": 2.0, "tokens": 2,
    }  # fmt: skip
    compared = [
        {"plan": name, "mean_latency_us": 2.0, "p95_latency_us": 2.0, "tokens_per_s": 1e6}
        for name in ("adaptive", "x", "y")
    ]
    write_adapt(
        folder / "x.adapt",
        {
            "program_digest": digest,
            "plans": ["x", "y"],
            "window_us": 3e5,
            "threshold": 1.5,
            "compared": compared,
        },
        {
            "windows": WINDOWS.build([window]),
            "decisions": DECISIONS.build([decision]),
            "requests": ADAPT_REQUESTS.build([adapted]),
        },
    )
    (folder / "c.toml").write_text(
        '[[device]]\nname = "cpu0"\ntype = "cpu-1thread"\n\n[[device]]\nname = "cpu1"\ntype = "cpu-1thread"\n'
    )
    (folder / "w.toml").write_text("[[request]]\narrival_ms = 0\noutput_tokens = 3\n")
