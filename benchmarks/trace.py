"""Every catalogued model at full size under --fake, some as a rank's shard too, and every tiny twin replayed bit
for bit.

Each model is traced in a process of its own, so that its peak memory is known; seconds are that whole process's,
and a program's are those of its own recording. Replay runs each program of a tiny twin for several iterations on
seeded inputs, and compares all outputs and the final state with those of the model itself. Of a shard, the weights of
all ranks are added up: what is cut once from each rank, what is whole once in all.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import Bar, report
from tessera_core.program.generate import new_memory, shared_buffers
from tessera_core.program.ir import Program, Trace
from tessera_core.program.replay import ProgramRunner
from tessera_core.program.store import load_trace
from tessera_core.program.weights import materialise_weights, random_inputs
from tessera_core.trace.factory import build
from tessera_core.trace.fake import new_fake_mode
from tessera_core.trace.model import TraceableModel
from tessera_core.trace.models.catalogue import CATALOGUE
from tessera_core.trace.models.shapes import DiffusionShape, Shape
from tessera_core.trace.parallel.shard import build_shard
from tessera_core.trace.parallel.shares import parse_shard
from tessera_core.trace.request import parse_program
from tessera_core.trace.stage import TraceStage
from tessera_formats.trace import read_trace

FULL = ("prefill:batch=1,context=1024", "decode:batch=64,context=1024")
TINY = ("prefill:batch=2,context=16", "decode:batch=4,context=64")
FULL_IMAGE, TINY_IMAGE = ("step:batch=2,context=128",), ("step:batch=2,context=16",)
SHARDS = (
    ("llama-3-8b", "2"),
    ("llama-3-8b", "2,1"),
    ("qwen2.5-32b", "2"),
    ("gpt-oss-20b", "2"),
    ("llama-3-70b", "8"),
)
"""Models whose first rank is traced, and the shares of the ranks."""
ITERATIONS = 3
MOST_SECONDS = 60
MOST_BYTES = 6_000_000_000


def is_tiny(shape: Shape) -> bool:
    """Whether a model is small enough to be run here."""
    return shape.name.endswith("-tiny")


def programs_of(shape: Shape) -> tuple[str, ...]:
    """The programs that are traced of a model."""
    if isinstance(shape, DiffusionShape):
        return TINY_IMAGE if is_tiny(shape) else FULL_IMAGE
    return TINY if is_tiny(shape) else FULL


def measure(shape: Shape, shares: str | None = None) -> dict[str, Any]:
    """Trace a model or its first rank's shard, and replay it if it is tiny; runs in a process of its own."""
    marks: list[tuple[str, float]] = []
    programs = tuple(parse_program(text) for text in programs_of(shape))
    stage = TraceStage(model=shape.name, programs=programs, fake=not is_tiny(shape), tensor_parallel=shares)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.trace"
        facts = stage.run(path, lambda message: marks.append((message, time.perf_counter())))
        launches = _launches(path)
        exact = replay(load_trace(path), shape) if is_tiny(shape) else {}
    seconds = {message: after - before for (message, before), (_, after) in itertools.pairwise(marks)}
    (table,) = facts.tables
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    return {
        "programs": {
            row["program"]: {
                "ops": row["ops"],
                "kernels": row["kernels"],
                "signatures": row["signatures"],
                "launches": launches.count(number),
                "guards": row["guards"],
                "flops": row["flops"],
                "seconds": round(seconds[f"tracing {row['program']}"], 2),
                **({"replay_exact": exact[row["program"]]} if exact else {}),
            }
            for number, row in enumerate(rows)
        },
        "weight_bytes": facts.values["weight_bytes"],
        **({} if shares is None else rank_weights(shape, shares)),
        "peak_memory_bytes": facts.values["peak_memory_bytes"],
    }


def rank_weights(shape: Shape, shares: str) -> dict[str, int]:
    """Bytes of the whole model's weights, and of all ranks' together, where what is whole counts once."""
    whole = build(shape.name, None, 0, new_fake_mode()).model.module
    cut, kept = 0, {}
    for rank in range(parse_shard(shares, 0).ranks):
        model = build_shard(shape.name, None, 0, parse_shard(shares, rank), new_fake_mode()).model
        for name, size in _sizes(model.module).items():
            if "slice" in (model.recipes or {}).get(name, {}):
                cut += size
            else:
                kept[name] = size
    return {
        "whole_weight_bytes": sum(_sizes(whole).values()),
        "all_ranks_weight_bytes": cut + sum(kept.values()),
    }


def _sizes(module: torch.nn.Module) -> dict[str, int]:
    return {name: tensor.nbytes for name, tensor in module.state_dict(keep_vars=True).items()}


def _launches(path: Path) -> list[int]:
    """The program of each captured launch, over all targets; none without a capture."""
    bundle = read_trace(path)
    tables = [bundle.table(f"targets/{target}/launches") for target in bundle.targets()]
    return [number for table in tables for number in table.column("program").to_pylist()]


@torch.no_grad()
def replay(trace: Trace, shape: Shape) -> dict[str, bool]:
    """By program, whether replay gives what the model gives: every output and all state, in every iteration."""
    torch.set_num_threads(1)
    model = build(shape.name, None, int(trace.info["seed"]), None).model
    return {program.name: _is_exact(trace, program, model) for program in trace.programs}


def _is_exact(trace: Trace, program: Program, model: TraceableModel) -> bool:
    request = parse_program(program.name)
    inputs = random_inputs(trace, program, 0, range(program.batch))
    state = model.make_state(request)
    weights = materialise_weights(trace, shared_buffers(trace, program))
    memory, runner = new_memory(trace, program, weights, inputs), ProgramRunner(trace, program)
    for _ in range(1 if program.phase == "prefill" else ITERATIONS):
        outputs = model.step(request, inputs, state)
        runner(memory)
        expected = {"output": outputs, "state": state}
        for binding in program.io:
            if binding.role != "input" and not torch.equal(
                memory.view(binding.tensor), expected[binding.role][binding.name]
            ):
                return False
        for name, binding in program.bindings("output").items():
            if binding.feeds is not None and inputs[binding.feeds].shape == outputs[name].shape:
                inputs[binding.feeds] = outputs[name]
                memory.view(program.bindings("input")[binding.feeds].tensor).copy_(outputs[name])
    return True


def main() -> int:
    """Measure each model in a process of its own and compare with the bars."""
    if len(sys.argv) in (2, 3):
        (shape,) = (shape for shape in CATALOGUE if shape.name == sys.argv[1])
        print(json.dumps(measure(shape, *sys.argv[2:])))
        return 0
    results: dict[str, Any] = {}
    bars: list[Bar] = []
    models = [(shape.name, ()) for shape in CATALOGUE if shape.source != "embedded"]
    for name, shares in [*models, *((name, (shares,)) for name, shares in SHARDS)]:
        (shape,) = (shape for shape in CATALOGUE if shape.name == name)
        said = " ".join((name, *(f"--tensor-parallel {each}" for each in shares)))
        print(f"{said} ...", file=sys.stderr)
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.trace", name, *shares],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        seconds = round(time.perf_counter() - started, 2)
        found = results[said] = {**json.loads(done.stdout), "seconds": seconds}
        if is_tiny(shape):
            exact = [program["replay_exact"] for program in found["programs"].values()]
            bars.append(
                Bar(f"{said}: programs replayed bit for bit", sum(exact), f"= {len(exact)}", all(exact))
            )
            continue
        peak = found["peak_memory_bytes"]
        if shares:
            together, once = found["all_ranks_weight_bytes"], found["whole_weight_bytes"]
            bars.append(Bar(f"{said}: weights of all ranks", together, f"= {once}", together == once))
        bars.append(Bar(f"{said}: seconds", seconds, f"< {MOST_SECONDS}", seconds < MOST_SECONDS))
        bars.append(Bar(f"{said}: peak memory", peak, f"< {MOST_BYTES}", peak < MOST_BYTES))
    return report("trace", results, bars)


if __name__ == "__main__":
    sys.exit(main())
