"""The unpartitioned program as the reference of a run: same requests, one process, one thread, one batch at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tessera_core.execute.batches import RequestBatch
from tessera_core.execute.feeds import renewed_inputs
from tessera_core.execute.lane import output_digest, token_values
from tessera_core.execute.pipeline import Outcome
from tessera_core.execute.segments import RouteModel
from tessera_core.program.generate import feed_outputs, move_state, new_memory, shared_buffers
from tessera_core.program.ir import Trace
from tessera_core.program.replay import ProgramRunner
from tessera_core.program.weights import materialise_weights, random_inputs


@dataclass(frozen=True, slots=True)
class Expected:
    """What a batch must give: tokens by iteration, and the digest of each final output by name."""

    tokens: Mapping[int, list[int]]
    digests: Mapping[str, str]


class Reference:
    """The unpartitioned programs of a route, ready to run batches."""

    def __init__(
        self, trace: Trace, model: RouteModel, seed: int, weights_file: Path | None, trusted: bool
    ) -> None:
        self._trace, self._seed = trace, seed
        self._programs = [trace.program(program.name) for program in model.programs]
        self._renewed = renewed_inputs(trace, self._programs, len(self._programs) - 1)
        self._runners = [ProgramRunner(trace, program, trusted) for program in self._programs]
        needed = {buffer for program in self._programs for buffer in shared_buffers(trace, program)}
        self._weights = materialise_weights(trace, needed, weights_file, trusted)

    def run(self, requests: Sequence[int], schedule: Sequence[int]) -> Expected:
        """Run one batch. ``requests``: one id per row of the last program's batch."""
        trace, last = self._trace, len(schedule) - 1
        tokens: dict[int, list[int]] = {}
        digests: dict[str, str] = {}
        final = self._programs[-1]
        # What nothing feeds holds the prompt; what the program before feeds is overwritten.
        prompt = random_inputs(trace, final, self._seed, requests)
        slot = new_memory(trace, final, self._weights, prompt)
        row = 0
        for iteration, index in enumerate(schedule):
            program, memory = self._programs[index], slot
            if program is not final:
                inputs = random_inputs(trace, program, self._seed, requests[row : row + program.batch])
                memory = new_memory(trace, program, self._weights, inputs)
            self._runners[index](memory)
            for binding in program.bindings("output").values():
                values = token_values(binding, memory.view(binding.tensor))
                if values is not None:
                    tokens[iteration] = values
            if iteration == last:
                digests = {
                    name: output_digest(memory.view(binding.tensor))
                    for name, binding in program.bindings("output").items()
                }
            elif program is final:
                feed_outputs(program, memory, program, memory, 0)
                for name in self._renewed:
                    memory.view(program.bindings("input")[name].tensor).copy_(prompt[name])
            else:
                move_state(trace, program, memory, final, slot, row)
                feed_outputs(program, memory, final, slot, row)
                row += program.batch
        return Expected(tokens, digests)


def differences(
    trace: Trace,
    models: Sequence[RouteModel],
    batches: Sequence[RequestBatch],
    outcome: Outcome,
    *,
    seed: int,
    weights_file: Path | None,
    trusted: bool,
) -> list[str]:
    """What differs between a run's finished batches and the unpartitioned programs, one line per batch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            references: dict[int, Reference] = {}
            found: list[str] = []
            for item in batches:
                if item.plan.batch not in outcome.finished:
                    continue
                route = item.plan.route
                if route not in references:
                    references[route] = Reference(trace, models[route], seed, weights_file, trusted)
                last = item.first + item.count - 1
                rows = [min(item.first + row, last) for row in range(models[route].batch)]
                expected = references[route].run(rows, item.plan.schedule)
                line = _difference(item.plan.batch, expected, outcome)
                if line:
                    found.append(line)
            return found
    finally:
        torch.set_num_threads(threads)


def _difference(batch: int, expected: Expected, outcome: Outcome) -> str:
    tokens, digests = outcome.tokens.get(batch, {}), outcome.digests.get(batch, {})
    for iteration, row in expected.tokens.items():
        if tokens.get(iteration) != row:
            return f"batch {batch}: tokens of iteration {iteration} differ"
    for name, digest in expected.digests.items():
        if digests.get(name) != digest:
            return f"batch {batch}: final output {name} differs"
    return ""
