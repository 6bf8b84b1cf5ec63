"""What a trace knows of its buffers' first values, and of its inputs: what has a name can be filled again.

Inputs, state and weights are filled view by view, by name. A step that uses more of their storage would find
there whatever was in memory, so such a use is refused, or the values are kept in the trace.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch

from tessera_core.program.boxes import Box, covers
from tessera_core.program.ir import Guard, IoBinding, Program, Weight
from tessera_core.trace.registry import Registry
from tessera_formats.errors import ModelError, UntracedLaunchError

_INPUT = "input:"


def keep_unnamed(registry: Registry, programs: Iterable[Program], weights: Iterable[Weight]) -> None:
    """Keep the values of weight buffers that a program uses beyond what their weights name.

    Raises :class:`ModelError` for such a use of an input or a state, and for weights without values.
    """
    named: dict[int, list[Box]] = defaultdict(list)
    for weight in weights:
        _note(registry, weight.tensor, named)
    for program in programs:
        for binding in program.io:
            if binding.role != "output":
                _note(registry, binding.tensor, named)
    for program in programs:
        used = {tensor for op in program.ops for tensor in op.inputs}
        used |= {binding.tensor for binding in program.io}
        for number in sorted(used):
            tensor = registry.tensors[number]
            entry, box = registry.buffers[tensor.buffer], tensor.box()
            if tensor.buffer not in named or box is None or covers(named[tensor.buffer], box):
                continue
            if entry.kind != "weight":
                raise ModelError(
                    f"{program.name}: the step uses more of the storage of {entry.kind} {entry.name} than"
                    f" {entry.name} itself; give it all of what the step uses, or a copy of its own"
                )
            if not entry.real:
                raise ModelError(
                    f"{program.name}: the step uses more of the storage of weight {entry.name} than is named,"
                    " and --fake has no values for it; register it as a buffer, or trace without --fake"
                )
            if entry.value is None:
                registry.keep_values(entry.id)


def check_guards_of(
    guards: Sequence[Guard],
    phase: str,
    io: Sequence[IoBinding],
    registry: Registry,
    host_reads: Mapping[str, str],
    said: str,
) -> None:
    """Refuse a guard on an input that is not there, or that later iterations get from an output.

    A prefill runs once for each request, on what the request brings. ``host_reads``: by input, the op that read
    it and where. Raises :class:`UntracedLaunchError` for a read, :class:`ModelError` for the model's own guard.
    """
    inputs = {binding.name: registry.tensors[binding.tensor] for binding in io if binding.role == "input"}
    fed = {binding.feeds for binding in io if binding.role == "output" and phase != "prefill"}
    for guard in guards:
        if not guard.subject.startswith(_INPUT):
            continue
        name = guard.subject.removeprefix(_INPUT)
        if name not in inputs or not 0 <= (guard.index or 0) < math.prod(inputs[name].shape):
            raise ModelError(
                f"{said}: a guard is on {guard.subject}[{guard.index or 0}], which is not there; correct it"
            )
        if name in fed and name in host_reads:
            raise UntracedLaunchError(
                f"{host_reads[name]}: reads input {name} on the host, which later iterations get from an output;"
                " compute it on the device"
            )
        if name in fed:
            raise ModelError(
                f"{said}: a guard is on input {name}, which later iterations get from an output and which"
                " cannot be checked before a request starts; leave the guard out"
            )


def check_kept(kept: Mapping[str, object], io: Sequence[IoBinding], registry: Registry, said: str) -> None:
    """Refuse a step that put other tensors into its dict of state. ``kept``: that dict after the step.

    State lives in its storages, so a tensor of another would be lost. Raises :class:`ModelError`.
    """
    bound = {binding.name: registry.tensors[binding.tensor] for binding in io if binding.role == "state"}
    for name, tensor in kept.items():
        if name not in bound:
            raise ModelError(f"{said}: the step puts {name!r} into state, which states does not declare")
        own = bound[name]
        entry = registry.find(tensor) if isinstance(tensor, torch.Tensor) else None
        if (
            not isinstance(tensor, torch.Tensor)
            or entry is None
            or entry.id != own.buffer
            or (tuple(tensor.shape), tuple(tensor.stride())) != (own.shape, own.stride)
            or tensor.storage_offset() != own.offset
        ):
            raise ModelError(
                f"{said}: the step rebinds state {name!r}, and the new value would be lost; write it in place,"
                f" e.g. state[{name!r}].copy_(...)"
            )


def check_feeds(feeds: Mapping[str, str], programs: Sequence[Program], registry: Registry, said: str) -> None:
    """Refuse feeds of an output or to an input that no program has, and those between unlike tensors.

    A prefill feeds decode programs, some of their rows; any other program feeds its own next iteration. Raises
    :class:`ModelError`.
    """
    outputs = {name for program in programs for name in program.bindings("output")}
    inputs = {name for program in programs for name in program.bindings("input")}
    for output, fed in feeds.items():
        if output not in outputs:
            raise ModelError(f"{said}: feeds names output {output!r}, which no step returns; correct feeds")
        if fed not in inputs:
            raise ModelError(f"{said}: output {output} feeds {fed!r}, which is no input; correct feeds")
    for source in programs:
        prefill = source.phase == "prefill"
        for target in [p for p in programs if p.phase == "decode"] if prefill else [source]:
            known = target.bindings("input")
            for name, binding in source.bindings("output").items():
                if binding.feeds not in known:
                    continue
                made = registry.tensors[binding.tensor]
                taken = registry.tensors[known[binding.feeds].tensor]
                rows = made.shape == taken.shape or prefill
                if (
                    not made.shape
                    or not rows
                    or made.shape[1:] != taken.shape[1:]
                    or made.dtype != taken.dtype
                ):
                    raise ModelError(
                        f"{said}: output {name} of {source.name} is {made.dtype} {list(made.shape)}, and input"
                        f" {binding.feeds} of {target.name}, which it feeds, {taken.dtype} {list(taken.shape)};"
                        " make them agree"
                    )


def _note(registry: Registry, number: int, named: dict[int, list[Box]]) -> None:
    """Add a named view's box to those of its buffer."""
    tensor = registry.tensors[number]
    box = tensor.box()
    named[tensor.buffer] += [] if box is None else [box]
