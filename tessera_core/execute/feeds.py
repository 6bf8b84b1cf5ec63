"""What a route's programs read, write and feed: the facts about a trace that cutting and executing segments share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tessera_core.plan.ir import Transfer
from tessera_core.program.ir import Program, Trace
from tessera_formats.errors import ArtifactError

Placed = Sequence[Mapping[str, Mapping[int, float]]]
"""For each program of a route: device -> kernel -> time in us."""


def kernel_buffers(trace: Trace, program: Program) -> tuple[frozenset[int], ...]:
    """The buffers that each kernel of a program reads or writes."""
    return tuple(
        frozenset(
            trace.tensors[tensor].buffer
            for op in kernel.ops
            for tensor in (*program.ops[op].inputs, *program.ops[op].outputs)
        )
        for kernel in program.kernels
    )


def last_writer(trace: Trace, program: Program, buffer: int) -> int | None:
    """The last kernel that writes a buffer."""
    for op in reversed(program.ops):
        written = {*op.outputs, *(operand.tensor for operand in op.operands if operand.mode == "write")}
        if any(trace.tensors[tensor].buffer == buffer for tensor in written):
            return op.kernel
    return None


def fed_program(programs: Sequence[Program], index: int) -> int:
    """The program that the outputs of ``index`` feed: itself if it is the last phase, else the next."""
    return min(index + 1, len(programs) - 1)


def fed_buffers(trace: Trace, programs: Sequence[Program], index: int) -> dict[str, int]:
    """Inputs of program ``index`` that some program's output feeds, with their buffers."""
    inputs = programs[index].bindings("input")
    return {
        binding.feeds: trace.tensors[inputs[binding.feeds].tensor].buffer
        for source, program in enumerate(programs)
        if fed_program(programs, source) == index
        for binding in program.bindings("output").values()
        if binding.feeds is not None and binding.feeds in inputs
    }


def fed_input(
    trace: Trace,
    programs: Sequence[Program],
    index: int,
    item: Transfer,
    placed: Placed,
) -> str | None:
    """The next iteration's input on the destination that a transfer's buffer becomes, if any."""
    for binding in programs[index].bindings("output").values():
        if binding.feeds is None or trace.tensors[binding.tensor].buffer != item.buffer:
            continue
        if item.producer != last_writer(trace, programs[index], item.buffer):
            continue
        target = fed_program(programs, index)
        wanted = fed_buffers(trace, programs, index=target).get(binding.feeds)
        uses = kernel_buffers(trace, programs[target])
        if any(wanted in uses[kernel] for kernel in placed[target].get(item.destination, {})):
            return binding.feeds
    return None


def check_homes(trace: Trace, programs: Sequence[Program], placed: Placed) -> None:
    """State must be made, in the phase before, on every device that uses it: it never crosses."""
    for index, program in enumerate(programs[:-1]):
        target = programs[fed_program(programs, index)]
        for name, binding in target.bindings("state").items():
            if name not in program.bindings("state"):
                continue
            source = trace.tensors[program.bindings("state")[name].tensor].buffer
            made = _users(trace, program, source, placed[index])
            lacking = (
                _users(
                    trace, target, trace.tensors[binding.tensor].buffer, placed[fed_program(programs, index)]
                )
                - made
            )
            if made and lacking:
                raise ArtifactError(
                    f"plan: {min(lacking)} uses state {name} in {target.name} but not in {program.name}; "
                    "run tessera partition again"
                )


def _users(
    trace: Trace, program: Program, buffer: int, placed: Mapping[str, Mapping[int, float]]
) -> set[str]:
    uses = kernel_buffers(trace, program)
    return {device for device, kernels in placed.items() if any(buffer in uses[k] for k in kernels)}
