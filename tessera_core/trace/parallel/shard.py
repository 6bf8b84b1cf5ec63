"""Cutting a model: from a model without memory and its parallel plan to one rank's part of it, filled.

A weight's part is the slice of the same seeded tensor that an unsharded model has, and its recipe says so: the parts
of all ranks together are the unsharded weights bit for bit. No more than one whole tensor exists at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tessera_core.program.ir import Guard, State
from tessera_core.program.weights import fill
from tessera_core.trace.factory import BuiltModel, build
from tessera_core.trace.fake import building, is_fake, new_fake_mode
from tessera_core.trace.model import TraceableModel
from tessera_core.trace.parallel.joining import join_parts
from tessera_core.trace.parallel.parts import CORRECT, Parts, part_shape
from tessera_core.trace.parallel.plan import ParallelPlan, Split, matches
from tessera_core.trace.parallel.shares import Shard
from tessera_core.trace.place import user_code
from tessera_core.trace.request import ProgramRequest
from tessera_formats.errors import InputError, ModelError

ALONE = (
    "replayed without the other ranks, an all-reduce returns this rank's part, and an all-gather that part"
    " between zeros"
)
"""Note of every shard's manifest: what its collectives mean where there is no process group."""


def build_shard(
    name: str, dtype: torch.dtype | None, seed: int, shard: Shard, fake_mode: FakeTensorMode | None
) -> BuiltModel:
    """Make one rank's part of the model called ``name``.

    Raises what :func:`~tessera_core.trace.factory.build` does, :class:`InputError` for a model without a plan or
    shares that its shapes don't permit, and :class:`ModelError` for a plan that does not fit the model.
    """
    return shard_model(build(name, dtype, seed, fake_mode or new_fake_mode()), seed, shard, fake_mode)


def shard_model(whole: BuiltModel, seed: int, shard: Shard, fake_mode: FakeTensorMode | None) -> BuiltModel:
    """One rank's part of a model that was built under a fake mode, and whose module becomes that part.

    ``fake_mode`` None: the part gets memory and values.
    """
    said = f"model {whole.origin['model']!r}"
    declared = getattr(whole.model, "parallel_plan", None)
    if declared is None:
        raise InputError(
            f"{said}: declares no parallel_plan(), so ranks can't share it; leave --tensor-parallel out"
        )
    with user_code(f"{said}: its parallel_plan", CORRECT):
        plan = declared()
    parts = Parts(said=said, plan=plan, shard=shard)
    return replace(whole, model=_cut(whole.model, parts, seed, fake_mode), shard=shard)


class ShardedModel:
    """One rank's part of a :class:`~tessera_core.trace.model.TraceableModel`."""

    def __init__(
        self,
        whole: TraceableModel,
        *,
        recipes: Mapping[str, dict[str, Any]],
        states: tuple[State, ...],
        notes: tuple[str, ...],
        seed: int,
    ) -> None:
        self._whole, self._seed = whole, seed
        self.module, self.feeds = whole.module, whole.feeds
        self.recipes: Mapping[str, dict[str, Any]] | None = recipes
        self.states, self.notes = states, notes

    def make_state(self, request: ProgramRequest) -> dict[str, torch.Tensor]:
        """The rank's part of each family, fresh."""
        with building(new_fake_mode()):
            whole = self._whole.make_state(request)
        inits = {state.name: state.init for state in self.states}
        made: dict[str, torch.Tensor] = {}
        for name, tensor in whole.items():
            part = inits[name].get("slice") if name in inits else None
            if part is not None and tensor.shape[part["axis"]] != part["extent"]:
                raise ModelError(
                    f"{request.name}: axis {part['axis']} of state {name} is {tensor.shape[part['axis']]} long, the"
                    f" parallel plan has {part['extent']}; {CORRECT}"
                )
            made[name] = torch.empty(part_shape(tensor.shape, part), dtype=tensor.dtype, device="cpu")
            if name in inits and not is_fake(made[name]):
                fill(made[name], f"state:{name}", inits[name], self._seed)
        return made

    def make_inputs(self, request: ProgramRequest) -> dict[str, torch.Tensor]:
        """The model's own: every rank reads all of them."""
        return self._whole.make_inputs(request)

    def step(
        self, request: ProgramRequest, inputs: dict[str, torch.Tensor], state: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The model's own, over this rank's parts."""
        return self._whole.step(request, inputs, state)

    def guards(self, request: ProgramRequest) -> tuple[Guard, ...]:
        """The model's own."""
        return self._whole.guards(request)


def _cut(whole: TraceableModel, parts: Parts, seed: int, fake_mode: FakeTensorMode | None) -> ShardedModel:
    """Cut and fill all weights and put the collectives in; changes the model's module."""
    plan, module = parts.plan, whole.module
    if whole.recipes is None:
        raise ModelError(
            f"{parts.said}: has no recipes for its weights, so a rank can't make its part; give it recipes"
        )
    tables = [
        Split(tensor=f"{lookup.module}.weight", axis=0, dimension=lookup.dimension) for lookup in plan.lookups
    ]
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    slices = parts.slices((*plan.splits, *tables), {name: tensor.shape for name, tensor in tensors.items()})
    if not slices:
        raise ModelError(f"{parts.said}: its parallel plan cuts nothing; {CORRECT}")
    recipes = dict(whole.recipes)
    for name, part in slices.items():
        if name not in recipes:
            raise ModelError(
                f"{parts.said}: weight {name} has no recipe, so a rank can't make its part; add one"
            )
        recipes[name] = {**recipes[name], "slice": part}
    made: dict[int, torch.Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, short = name.rpartition(".")
        owner = module.get_submodule(prefix)
        if parts.shard.rank and any(matches(pattern, name) for pattern in plan.first_only):
            setattr(owner, short, None)
            recipes.pop(name, None)
            continue
        if id(tensor) not in made:
            made[id(tensor)] = _filled(name, tensor, recipes.get(name), parts.said, seed, fake_mode)
        if isinstance(tensor, torch.nn.Parameter):
            setattr(owner, short, torch.nn.Parameter(made[id(tensor)], requires_grad=False))
        else:
            owner.register_buffer(short, made[id(tensor)], short not in owner._non_persistent_buffers_set)
    join_parts(module, parts)
    return ShardedModel(
        whole,
        recipes=recipes,
        states=_states(whole.states, parts),
        notes=(*getattr(whole, "notes", ()), *_notes(plan, parts)),
        seed=seed,
    )


def _filled(
    name: str,
    tensor: torch.Tensor,
    recipe: Mapping[str, Any] | None,
    said: str,
    seed: int,
    fake_mode: FakeTensorMode | None,
) -> torch.Tensor:
    """This rank's part of a tensor; fake only where ``--fake`` would have it so."""
    if recipe is None and is_fake(tensor) and fake_mode is None:
        raise ModelError(f"{said}: buffer {name} has no recipe, so a rank can't make it; add one")
    if recipe is None:
        return tensor.detach()
    with building(fake_mode):
        fresh = torch.empty(part_shape(tensor.shape, recipe.get("slice")), dtype=tensor.dtype)
    if not is_fake(fresh):
        with torch.no_grad():
            fill(fresh, name, recipe, seed)
    return fresh


def _states(states: tuple[State, ...], parts: Parts) -> tuple[State, ...]:
    """The families; a cut one has its slice in its recipe, as a weight has."""
    found = {state.name: state for state in states}
    for split in parts.plan.states:
        extent = sum(split.sections) or parts.dimension(split.dimension).extent
        shapes = {name: [extent] * (split.axis + 1) for name in found}
        for name, part in parts.slices([split], shapes).items():
            found[name] = replace(found[name], init={**found[name].init, "slice": part})
    return tuple(found.values())


def _notes(plan: ParallelPlan, parts: Parts) -> tuple[str, ...]:
    shard = parts.shard
    found = "; ".join(f"{one.name} {_written(parts.counts(one.name))}" for one in plan.dimensions)
    return (
        f"rank {shard.rank} of {shard.ranks}, shares {_written(shard.shares)}: {found}",
        ALONE,
        *plan.notes,
    )


def _written(numbers: Sequence[int]) -> str:
    if len(set(numbers)) == 1:
        return f"{numbers[0]} each"
    return ",".join(str(number) for number in numbers)
