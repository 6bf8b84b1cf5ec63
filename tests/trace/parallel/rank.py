"""One rank of a tensor-parallel replay, run as a script: RANK RANKS RENDEZVOUS JOBS.

``JOBS`` is a JSON list of [trace, output]: every program of each trace is replayed with collectives over gloo, for
one iteration of a prefill and three of a decode, and the outputs and final states go to ``output``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tessera_core.program.generate import new_memory, shared_buffers
from tessera_core.program.replay import ProgramRunner
from tessera_core.program.store import load_trace
from tessera_core.program.weights import materialise_weights, random_inputs

ITERATIONS = 3


def replay(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    """By program, its outputs of every iteration and its final states."""
    trace = load_trace(path)
    found: dict[str, dict[str, torch.Tensor]] = {}
    for program in trace.programs:
        weights = materialise_weights(trace, shared_buffers(trace, program))
        memory = new_memory(trace, program, weights, random_inputs(trace, program, 5, range(program.batch)))
        runner, kept = ProgramRunner(trace, program), {}
        outputs, inputs = program.bindings("output"), program.bindings("input")
        for iteration in range(1 if program.phase == "prefill" else ITERATIONS):
            runner(memory)
            for name, binding in outputs.items():
                kept[f"{name} {iteration}"] = memory.view(binding.tensor).clone()
                if program.phase == "decode" and binding.feeds is not None:
                    memory.view(inputs[binding.feeds].tensor).copy_(memory.view(binding.tensor))
        for name, binding in program.bindings("state").items():
            kept[f"state {name}"] = memory.view(binding.tensor).clone()
        found[program.name] = kept
    return found


def main() -> None:
    """Join the other ranks and do the jobs."""
    rank, ranks, rendezvous, jobs = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=int(rank), world_size=int(ranks))
    for path, output in json.loads(jobs):
        torch.save(replay(Path(path)), output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
