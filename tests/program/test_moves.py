"""State and outputs that move from prefill programs into the slot of a decode program."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tessera_core.program.generate import feed_outputs, move_state
from tessera_core.program.ir import IoBinding
from tessera_core.program.memory import Memory
from tessera_core.program.weights import initial_state
from tessera_formats.errors import InputError


def two_programs(writer: Any, prompt: int = 3, capacity: int = 5) -> Any:
    """Prefill of one request and a prompt; decode of four requests and a capacity."""
    cache = writer.state("cache", (4, 2, capacity), batch_axis=0, sequence_axis=2)
    position = writer.state("position", (1,), "int64")
    tokens = writer.input("tokens", (4, 1), "int64")
    decode_io, writer.io = tuple(writer.io), []
    first_cache = writer.buffer("state", (1, 2, prompt))
    first_position = writer.buffer("state", (1,), "int64")
    next_token = writer.buffer("output", (1, 1), "int64")
    prefill_io = (
        IoBinding(role="state", name="cache", tensor=first_cache, feeds=None),
        IoBinding(role="state", name="position", tensor=first_position, feeds=None),
        IoBinding(role="output", name="next_token", tensor=next_token, feeds="tokens"),
    )
    trace = writer.trace()
    decode = replace(trace.programs[0], name="decode", io=decode_io)
    prefill = replace(decode, id=1, name="prefill", io=prefill_io)
    trace = replace(trace, programs=(decode, prefill))
    return trace, prefill, decode, (cache, position, tokens), (first_cache, first_position, next_token)


def memory_for(trace: Any, program: Any, others: list[int]) -> Memory:
    memory = Memory(trace)
    memory.bind_all(initial_state(trace, program))
    for tensor in others:
        buffer = trace.tensors[tensor].buffer
        memory.bind(buffer, torch.zeros(trace.buffers[buffer].bytes, dtype=torch.uint8).untyped_storage())
    return memory


def test_requests_land_in_their_rows(writer: Any) -> None:
    trace, prefill, decode, (cache, position, tokens), firsts = two_programs(writer)
    slot = memory_for(trace, decode, [tokens])
    expected = torch.zeros(4, 2, 5)
    for request in range(4):
        memory = memory_for(trace, prefill, [firsts[2]])
        value = torch.randn(1, 2, 3)
        memory.view(firsts[0]).copy_(value)
        memory.view(firsts[1]).fill_(3)
        memory.view(firsts[2]).fill_(100 + request)
        move_state(trace, prefill, memory, decode, slot, request)
        feed_outputs(prefill, memory, decode, slot, request)
        expected[request, :, :3] = value[0]
    assert torch.equal(slot.view(cache), expected)
    assert slot.view(position).tolist() == [3]
    assert slot.view(tokens).tolist() == [[100], [101], [102], [103]]


def test_only_the_named_families_move(writer: Any) -> None:
    trace, prefill, decode, (cache, position, tokens), firsts = two_programs(writer)
    slot, memory = memory_for(trace, decode, [tokens]), memory_for(trace, prefill, [firsts[2]])
    memory.view(firsts[0]).fill_(1.0)
    memory.view(firsts[1]).fill_(3)
    move_state(trace, prefill, memory, decode, slot, 0, families=("position",))
    assert slot.view(position).tolist() == [3]
    assert not slot.view(cache).any()


def test_a_prompt_longer_than_the_cache_is_refused(writer: Any, one_line: Any) -> None:
    trace, prefill, decode, (_, _, tokens), firsts = two_programs(writer, prompt=6, capacity=5)
    slot, memory = memory_for(trace, decode, [tokens]), memory_for(trace, prefill, [firsts[2]])
    with pytest.raises(InputError) as caught:
        move_state(trace, prefill, memory, decode, slot, 0)
    assert "holds 5 tokens of cache" in one_line(caught)
