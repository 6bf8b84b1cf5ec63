"""Floats of eight bits are held and replayed bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tessera_core.program.memory import Memory
from tessera_core.program.replay import run_program
from tessera_core.program.weights import initial_state

NAMES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")


@pytest.mark.parametrize("name", NAMES)
def test_conversions_and_copies_are_replayed_bit_for_bit(tracer: Callable[..., Any], name: str) -> None:
    seen: dict[str, torch.Tensor] = {}

    def step(net: Any, inputs: dict[str, torch.Tensor], state: Any) -> dict[str, torch.Tensor]:
        small = (inputs["tokens"] * torch.linspace(-30.0, 500.0, 97)).to(getattr(torch, name))
        seen["small"] = torch.cat([small.clone(), small], 1)
        seen["wide"] = seen["small"].float()
        return dict(seen)

    trace = tracer(step).trace
    program, memory = trace.programs[0], Memory(trace)
    for buffer, storage in initial_state(trace, program).items():
        memory.bind(buffer, storage)
    for buffer in (b.id for b in trace.buffers if b.kind == "constant"):
        memory.bind(buffer, torch.linspace(-30.0, 500.0, 97).untyped_storage())
    tokens = trace.tensors[program.bindings("input")["tokens"].tensor].buffer
    memory.bind(tokens, torch.arange(2).reshape(2, 1).untyped_storage())
    run_program(trace, program, memory)
    for key, binding in program.bindings("output").items():
        made = memory.view(binding.tensor)
        assert torch.equal(made.view(torch.uint8), seen[key].view(torch.uint8))
