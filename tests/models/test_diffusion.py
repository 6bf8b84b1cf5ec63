"""The diffusion transformer: replay of several steps, bit for bit."""

from typing import Any

import pytest
import torch

from tessera_core.program.generate import new_memory, shared_buffers
from tessera_core.program.replay import ProgramRunner
from tessera_core.program.weights import materialise_weights, random_inputs
from tessera_core.trace.build import trace_model
from tessera_core.trace.factory import build
from tessera_core.trace.models import build_model
from tessera_core.trace.request import ProgramRequest
from tessera_formats.errors import InputError

NAME = "stable-diffusion-3.5-tiny"
REQUESTS = (ProgramRequest("step", 2, 16), ProgramRequest("step", 1, 8))

pytest.importorskip("diffusers")


@torch.no_grad()
def test_steps_are_exact() -> None:
    trace = trace_model(build(NAME, None, 3, None), REQUESTS, seed=3, fake_mode=None, versions={}).trace
    model = build(NAME, None, 3, None).model
    for request in REQUESTS:
        program = trace.program(request.name)
        weights = materialise_weights(trace, shared_buffers(trace, program))
        inputs = random_inputs(trace, program, 0, range(program.batch))
        memory, runner = new_memory(trace, program, weights, inputs), ProgramRunner(trace, program)
        for _ in range(3):
            outputs = model.step(request, inputs, {})
            runner(memory)
            for name, binding in program.bindings("output").items():
                assert torch.equal(memory.view(binding.tensor), outputs[name]), name
            inputs["latents"] = outputs["latents"]
            memory.view(program.bindings("input")["latents"].tensor).copy_(outputs["latents"])


@torch.no_grad()
def test_a_step_moves_the_latents_along_the_velocity() -> None:
    model: Any = build_model(NAME, None, 0)
    request = REQUESTS[1]
    generator = torch.Generator().manual_seed(0)
    inputs = {
        name: torch.randn(value.shape, generator=generator)
        for name, value in model.make_inputs(request).items()
    }
    outputs = model.step(request, inputs, {})
    moved = inputs["latents"] + inputs["step_size"].item() * outputs["velocity"]
    assert torch.allclose(outputs["latents"], moved)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (ProgramRequest("decode", 1, 8), "phase step"),
        (ProgramRequest("step", 1, 9), "multiple of 2"),
        (ProgramRequest("step", 1, 50), "up to 48"),
    ],
)
def test_other_requests_are_refused(request_: ProgramRequest, says: str, one_line: Any) -> None:
    model = build_model(NAME, None, 0)
    with pytest.raises(InputError) as caught:
        model.make_inputs(request_)
    assert says in one_line(caught)
