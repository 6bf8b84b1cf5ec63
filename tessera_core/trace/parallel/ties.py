"""Kernels that are tied by a collective: those between which a tensor is a shard or a partial sum.

What is the same on every rank can be handed to a device with other ranks or other shares; a shard can't. So the
kernels from the first that reads a cut weight or state to the collective that joins the ranks share a device, and
the replicated ones between two collectives (norms, residual sums) are free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

from tessera_core.program.ir import Program, TensorRef
from tessera_core.trace.operators import op_kind
from tessera_core.trace.parallel.parts import CORRECT
from tessera_formats.errors import ModelError


def tie_kernels(
    program: Program, tensors: Sequence[TensorRef], weights: Collection[int], states: Collection[str]
) -> Program:
    """The program with its kernels' groups, numbered by their first kernel.

    ``weights``: buffers that are cut; ``states``: names of families that are. Raises :class:`ModelError` where a
    shard leaves the program or is kept in a state that is not cut: the plan lacks a join.
    """
    cut_states = {tensors[b.tensor].buffer for b in program.bindings("state").values() if b.name in states}
    shards = {*weights, *cut_states}
    parent = list(range(len(program.kernels)))

    def root(kernel: int) -> int:
        while parent[kernel] != kernel:
            parent[kernel] = kernel = parent[parent[kernel]]
        return kernel

    touching: dict[int, int] = {}
    tied: set[int] = set()
    for op in program.ops:
        given = {tensors[tensor].buffer for tensor in op.inputs}
        found = given & shards
        if not found:
            continue
        tied.add(op.kernel)
        if op_kind(op.target) != "collective":
            made = {tensors[tensor].buffer for tensor in op.outputs}
            made |= {tensors[operand.tensor].buffer for operand in op.operands if operand.mode == "write"}
            shards |= made
            found |= made
        for buffer in found.difference(weights):
            first = touching.setdefault(buffer, op.kernel)
            low, high = sorted((root(first), root(op.kernel)))
            parent[high] = low
    _check_joined(program, tensors, shards - cut_states)
    members: dict[int, list[int]] = defaultdict(list)
    for kernel in sorted(tied):
        members[root(kernel)].append(kernel)
    group_of = {kernel: number for number, first in enumerate(members) for kernel in members[first]}
    return replace(
        program,
        kernels=tuple(replace(kernel, group=group_of.get(kernel.id)) for kernel in program.kernels),
    )


def _check_joined(program: Program, tensors: Sequence[TensorRef], shards: Collection[int]) -> None:
    for binding in program.io:
        if tensors[binding.tensor].buffer in shards:
            raise ModelError(
                f"{program.name}: {binding.role} {binding.name} is one rank's part, and nothing joins it; {CORRECT}"
            )
