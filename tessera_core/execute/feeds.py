"""What a route's programs read, write and feed: the facts about a trace that cutting and executing segments share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tessera_core.deps.accesses import ALLOCATION_PREFIXES, fold_ops
from tessera_core.plan.ir import Transfer
from tessera_core.program.boxes import covers
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


def writers(trace: Trace, program: Program, buffer: int) -> set[int]:
    """The kernels that write a buffer; whoever only allocates it writes nothing."""
    return {
        op.kernel
        for op in program.ops
        if not op.target.startswith(ALLOCATION_PREFIXES)
        and any(o.mode == "write" and trace.tensors[o.tensor].buffer == buffer for o in op.operands)
    }


def last_writer(trace: Trace, program: Program, buffer: int) -> int | None:
    """The last kernel that writes a buffer: kernels run in the order of their ids, whatever that of the ops."""
    return max(writers(trace, program, buffer), default=None)


def taken_after(trace: Trace, program: Program, buffer: int) -> int:
    """The kernel after which an output's value is taken, on the device that runs it.

    It is the last writer; of what nothing writes (an input, a weight) the last user, or else the last kernel.
    """
    writer = last_writer(trace, program, buffer)
    if writer is not None:
        return writer
    users = [kernel for kernel, buffers in enumerate(kernel_buffers(trace, program)) if buffer in buffers]
    return max(users, default=len(program.kernels) - 1)


def written_buffers(trace: Trace, program: Program, kernels: Collection[int]) -> set[int]:
    """The buffers that some kernels define or write."""
    return {
        trace.tensors[tensor].buffer
        for op in program.ops
        if op.kernel in kernels
        for tensor in (*op.outputs, *(operand.tensor for operand in op.operands if operand.mode == "write"))
    }


def born_buffers(trace: Trace, program: Program, kernels: Collection[int]) -> set[int]:
    """The buffers of which some kernels, run in order, touch nothing before an op of theirs defines it."""
    seen: set[int] = set()
    born: set[int] = set()
    for kernel in sorted(kernels):
        for number in program.kernels[kernel].ops:
            op = program.ops[number]
            arguments = {trace.tensors[tensor].buffer for tensor in op.inputs}
            results = {trace.tensors[tensor].buffer for tensor in op.outputs}
            born |= results - arguments - seen
            seen |= results | arguments
    return born


def last_uses(trace: Trace, program: Program, kernels: Collection[int]) -> dict[int, int]:
    """The last of some kernels to use each buffer that lives among them for part of an iteration only."""
    uses = kernel_buffers(trace, program)
    lasting = {trace.tensors[binding.tensor].buffer for binding in program.io}
    born = born_buffers(trace, program, kernels) - lasting
    return {
        buffer: kernel
        for kernel in sorted(kernels)
        for buffer in uses[kernel]
        if buffer in born and trace.buffers[buffer].kind in ("activation", "workspace")
    }


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


def _fed_names(program: Program) -> set[str]:
    return {binding.feeds for binding in program.bindings("output").values() if binding.feeds is not None}


def prompted_inputs(programs: Sequence[Program], index: int) -> frozenset[str]:
    """Inputs that hold the prompt (a function of seed and request) when a program's first iteration begins.

    They are those that the program before doesn't feed.
    """
    names = frozenset(programs[index].bindings("input"))
    return names - _fed_names(programs[index - 1]) if index else names


def renewed_inputs(trace: Trace, programs: Sequence[Program], index: int) -> frozenset[str]:
    """Inputs that a program writes and nothing feeds: they hold the prompt again when each iteration begins."""
    program = programs[index]
    written = written_buffers(trace, program, range(len(program.kernels)))
    inputs = program.bindings("input")
    return frozenset(
        name
        for name in prompted_inputs(programs, index) - _fed_names(program)
        if trace.tensors[inputs[name].tensor].buffer in written
    )


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
    uses = [kernel_buffers(trace, program) for program in programs]
    for index, program in enumerate(programs[:-1]):
        following = fed_program(programs, index)
        target = programs[following]
        for name, binding in target.bindings("state").items():
            if name not in program.bindings("state"):
                continue
            source = trace.tensors[program.bindings("state")[name].tensor].buffer
            made = _users(uses[index], source, placed[index])
            lacking = _users(uses[following], trace.tensors[binding.tensor].buffer, placed[following]) - made
            if made and lacking:
                raise ArtifactError(
                    f"plan: {min(lacking)} uses state {name} in {target.name} but not in {program.name}; "
                    "run tessera partition again"
                )


def wants_fed(trace: Trace, program: Program, buffer: int, kernels: Collection[int]) -> bool:
    """Whether kernels on a device need what an input is fed, because one reads it before it is overwritten.

    Raises :class:`ArtifactError` where none does, but the rest of what they overwrite becomes an output.
    """
    here = [a for a in fold_ops(trace, program) if a.kernel in kernels and a.buffer == buffer]
    if any(access.needs_content for access in here):
        return True
    for name, binding in program.bindings("output").items():
        reference = trace.tensors[binding.tensor]
        if reference.buffer != buffer or taken_after(trace, program, buffer) not in kernels:
            continue
        written = [box for access in here for box in access.boxes or ()]
        whole = reference.box()
        if whole is not None and not covers(written, whole):
            raise ArtifactError(
                f"{program.name}: output {name} is an input that is fed and overwritten in part; return a clone"
            )
    return False


def check_io(trace: Trace, programs: Sequence[Program], placed: Placed) -> None:
    """Each output must lie whole on one device, and each input hold the same on all of them.

    Raises :class:`ArtifactError` for a plan whose writers of an output are apart, and for what can't be run
    partitioned: an unwritten output that some iteration would have to bring there, an input that is written
    in place and lasts for several iterations.
    """
    for index, program in enumerate(programs):
        uses = kernel_buffers(trace, program)
        fed = fed_buffers(trace, programs, index)
        for name, binding in program.bindings("output").items():
            buffer = trace.tensors[binding.tensor].buffer
            kind = trace.buffers[buffer].kind
            making = writers(trace, program, buffer)
            what = f"{program.name}: output {name}"
            if not making:
                if binding.feeds is not None:
                    raise ArtifactError(
                        f"{what} feeds {binding.feeds}, but no kernel writes it; return a clone"
                    )
                if (kind == "state" or buffer in fed.values()) and not any(buffer in some for some in uses):
                    raise ArtifactError(f"{what} is touched by no kernel; return a clone")
            elif kind != "state":
                spots = {device for device, kernels in placed[index].items() if max(making) in kernels}
                apart = [k for k in sorted(making) if any(k not in placed[index][device] for device in spots)]
                if apart:
                    raise ArtifactError(
                        f"plan: {what} is written by kernels {apart[0]} and {max(making)} on different devices; "
                        "run tessera partition again"
                    )
            if binding.feeds is not None and any(
                buffer == fed[other] for other in fed if other != binding.feeds
            ):
                raise ArtifactError(f"{what} feeds {binding.feeds} and is another fed input; return a clone")
        lasting = set(fed) - prompted_inputs(programs, index) - _fed_names(program)
        written = written_buffers(trace, program, range(len(program.kernels)))
        for name in sorted(lasting):
            if fed_program(programs, index) == index and fed[name] in written:
                raise ArtifactError(
                    f"{program.name}: input {name} is written in place and only {programs[index - 1].name} "
                    "feeds it; let the step write a clone"
                )


def _users(
    uses: Sequence[frozenset[int]], buffer: int, placed: Mapping[str, Mapping[int, float]]
) -> set[str]:
    return {device for device, kernels in placed.items() if any(buffer in uses[k] for k in kernels)}
