"""Values of weights, constants, state and inputs: from seeded recipes, a safetensors file or the trace itself.

Every tensor is a pure function of (seed, name, recipe), so that any worker builds only what it holds, in any
order, and gets what the tracer got: tracing and running both go through :func:`fill`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_safetensors
from torch._guards import detect_fake_mode

from tessera_core.program.guards import guarded_inputs
from tessera_core.program.ir import Program, TensorRef, Trace, Weight
from tessera_core.program.memory import allocate, view_of
from tessera_core.program.user_code import factory_weights
from tessera_formats.errors import ArtifactError, InputError

DERIVED_KINDS = frozenset({"arange", "constant", "inverse_frequencies"})
"""Recipes of values that follow from the model's shape: a weights file need not hold them."""

UNIFORM_KINDS = frozenset({"ones", "zeros", "full"})
"""Recipes of values that are the same everywhere, so that a part needs no whole."""


_VOCABULARY_ROWS = "tessera.vocabulary_rows."
"""Lookup in one rank's part of a table; its fourth argument is how many rows the whole table has."""


def generator_for(seed: int, *names: object) -> torch.Generator:
    """A CPU generator that depends on ``seed`` and ``names`` alone."""
    key = "|".join(str(part) for part in (seed, *names))
    digest = hashlib.sha256(key.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def fill(tensor: torch.Tensor, name: str, recipe: Mapping[str, Any], seed: int) -> None:
    """Fill ``tensor`` in place as ``recipe`` says; random kinds are keyed by ``(seed, name)``.

    Kinds: ``normal`` (mean, std), ``uniform`` (low, high), ``ones``, ``zeros``, ``full`` (value), ``arange``
    (start, step), ``inverse_frequencies`` (theta: rotary embedding's ``theta ** -(2 i / 2 n)`` over the n
    elements). With ``slice`` (axis, extent, ranges), ``tensor`` is that part of a tensor which has ``extent``
    along the axis. Raises :class:`ArtifactError` for any other.
    """
    part = recipe.get("slice")
    if part is not None:
        _fill_part(tensor, name, recipe, part, seed)
        return
    try:
        match recipe.get("kind"):
            case "normal":
                generator = generator_for(seed, name)
                tensor.normal_(float(recipe.get("mean", 0.0)), float(recipe["std"]), generator=generator)
            case "uniform":
                generator = generator_for(seed, name)
                tensor.uniform_(float(recipe["low"]), float(recipe["high"]), generator=generator)
            case "ones":
                tensor.fill_(1)
            case "zeros":
                tensor.zero_()
            case "full":
                tensor.fill_(recipe["value"])
            case "arange":
                start, step = recipe.get("start", 0), recipe.get("step", 1)
                values = torch.arange(tensor.numel(), dtype=torch.float64) * step + start
                tensor.copy_(values.reshape(tensor.shape))
            case "inverse_frequencies":
                exponents = torch.arange(tensor.numel(), dtype=torch.float32) / tensor.numel()
                tensor.copy_((1.0 / (float(recipe["theta"]) ** exponents)).reshape(tensor.shape))
            case kind:
                raise ArtifactError(f"{name}: recipe {kind!r} is unknown; trace again")
    except (KeyError, TypeError, ValueError, RuntimeError) as problem:
        raise ArtifactError(
            f"{name}: recipe {dict(recipe)} does not work ({problem}); trace again"
        ) from problem


def _fill_part(
    tensor: torch.Tensor, name: str, recipe: Mapping[str, Any], part: Mapping[str, Any], seed: int
) -> None:
    """Fill a part with the values that it has in the whole tensor, which exists only meanwhile."""
    rest = {key: value for key, value in recipe.items() if key != "slice"}
    if recipe.get("kind") in UNIFORM_KINDS:
        fill(tensor, name, rest, seed)
        return
    try:
        shape = list(tensor.shape)
        shape[part["axis"]] = part["extent"]
        whole = torch.empty(shape, dtype=tensor.dtype)
        fill(whole, name, rest, seed)
        tensor.copy_(_cut(whole, part))
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as problem:
        raise ArtifactError(f"{name}: slice {dict(part)} does not work ({problem}); trace again") from problem


def _cut(whole: torch.Tensor, part: Mapping[str, Any]) -> torch.Tensor:
    """The ranges of the axis that a recipe's ``slice`` names, in a row."""
    pieces = [whole.narrow(part["axis"], first, last - first) for first, last in part["ranges"]]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=part["axis"])


def initialise_module(module: torch.nn.Module, recipes: Mapping[str, Mapping[str, Any]], seed: int) -> None:
    """Fill a module's parameters and buffers by their recipes; does nothing where values are fake.

    Raises :class:`InputError` for a recipe of a name that the module lacks.
    """
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    unknown = sorted(set(recipes) - set(tensors))
    if unknown:
        raise InputError(f"recipe for {unknown[0]!r}: the model has no such weight; correct the factory")
    with torch.no_grad():
        for name, recipe in recipes.items():
            if detect_fake_mode(tensors[name]) is None:
                fill(tensors[name], name, recipe, seed)


def materialise_weights(
    trace: Trace, buffers: Iterable[int], weights_file: Path | str | None = None, trusted: bool = False
) -> dict[int, torch.UntypedStorage]:
    """Storages of the given weight and constant buffers, filled.

    With ``weights_file`` (safetensors) named weights come from there: every weight of the model must be in
    it, and nothing else. Otherwise each comes from its recipe; only ``trusted`` may call the user's factory.
    """
    wanted = sorted(set(buffers))
    storages = {buffer: allocate(trace, buffer) for buffer in wanted}
    for buffer in wanted:
        if trace.buffers[buffer].kind not in ("weight", "constant"):
            raise ArtifactError(f"buffer {buffer}: is {trace.buffers[buffer].kind}, not a weight or constant")
    named = [weight for weight in trace.weights if weight.buffer in storages]
    loaded: dict[str, torch.Tensor] = {}
    if weights_file is not None:
        loaded = _read_weights(trace, named, Path(weights_file))
    rest = [weight for weight in named if weight.name not in loaded]
    made = factory_weights(trace, [w.name for w in rest if w.init.get("kind") == "factory"], trusted)
    made |= _exported(trace, [w.name for w in rest if w.init.get("kind") == "export"])
    recorded = {buffer for buffer in wanted if trace.buffers[buffer].kind == "constant"}
    recorded |= {weight.buffer for weight in rest if weight.init.get("kind") == "constant"}
    _fill_recorded(trace, storages, recorded)
    for weight in named:
        target = view_of(storages[weight.buffer], trace.tensors[weight.tensor])
        value = loaded.get(weight.name, made.get(weight.name))
        if value is not None:
            _check_like(value, trace.tensors[weight.tensor], weight.name, weights_file or "the factory")
            target.copy_(value)
        elif weight.init.get("kind") != "constant":
            fill(target, weight.name, weight.init, int(trace.info["seed"]))
    return storages


def initial_state(trace: Trace, program: Program) -> dict[int, torch.UntypedStorage]:
    """Fresh state of one slot for a program, by buffer id."""
    families = {state.name: state for state in trace.states}
    storages: dict[int, torch.UntypedStorage] = {}
    for name, binding in program.bindings("state").items():
        if name not in families:
            raise ArtifactError(
                f"{program.name}: binds state {name!r}, which no family declares; trace again"
            )
        reference = trace.tensors[binding.tensor]
        storage = storages.setdefault(reference.buffer, allocate(trace, reference.buffer))
        fill(view_of(storage, reference), f"state:{name}", families[name].init, int(trace.info["seed"]))
    return storages


def random_inputs(
    trace: Trace, program: Program, seed: int, requests: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Inputs of a batch by name; the row of each request depends on (seed, request id) only.

    ``requests``: one id per row of the batch. Integers are drawn below the number of rows of the table that
    they index, floats from the standard normal distribution.
    """
    if len(requests) != program.batch:
        raise InputError(f"{program.name}: takes {program.batch} requests, not {len(requests)}")
    inputs: dict[str, torch.Tensor] = {}
    for name, binding in program.bindings("input").items():
        reference = trace.tensors[binding.tensor]
        storage = torch.zeros(trace.buffers[reference.buffer].bytes, dtype=torch.uint8).untyped_storage()
        tensor = view_of(storage, reference)
        if reference.shape[:1] == (program.batch,):
            rows = [(tensor[index], request) for index, request in enumerate(requests)]
        else:
            rows = [(tensor, -1)]  # shared by the batch
        limit = _index_limit(trace, program, reference.buffer)
        for row, request in rows:
            generator = generator_for(seed, "input", name, request)
            if tensor.dtype.is_floating_point:
                row.normal_(generator=generator)
            else:
                row.random_(0, limit, generator=generator)
        inputs[name] = tensor
    return inputs


def guarded_prompts(
    trace: Trace, program: Program, seed: int, requests: Sequence[int], feeding: Sequence[Program]
) -> Iterator[dict[str, list[int]]]:
    """For each batch of ``requests``, the flattened elements of the inputs that guards of ``program`` look at.

    The values that :func:`random_inputs` gives. ``feeding``: the programs whose outputs become inputs of this one;
    such an input has no value before the requests start, and is left out. Nothing is drawn where no guard looks.
    """
    names = guarded_inputs(program)
    fed = {binding.feeds for source in feeding for binding in source.bindings("output").values()}
    for row in range(0, len(requests) if names else 0, program.batch):
        inputs = random_inputs(trace, program, seed, requests[row : row + program.batch])
        yield {name: inputs[name].flatten().tolist() for name in sorted((names & inputs.keys()) - fed)}


def _index_limit(trace: Trace, program: Program, buffer: int) -> int:
    """Rows of the smallest table that an embedding looks up with the input; 2 where there is none."""
    limits = [
        trace.tensors[op.inputs[0]].shape[0]
        for op in program.ops
        if op.target.startswith("aten.embedding.")
        and len(op.inputs) == 2
        and trace.tensors[op.inputs[1]].buffer == buffer
    ]
    limits += [
        int(op.arguments["args"][3])
        for op in program.ops
        if op.target.startswith(_VOCABULARY_ROWS) and trace.tensors[op.inputs[0]].buffer == buffer
    ]
    return min(limits, default=2)


def _fill_recorded(
    trace: Trace, storages: Mapping[int, torch.UntypedStorage], needed: Collection[int]
) -> None:
    """Fill every storage whose bytes are in the trace; those ``needed`` must be.

    A weight's buffer is there too where it holds more than its recipes can make.
    """
    try:
        values = load_safetensors(trace.constants)
    except (SafetensorError, ValueError, KeyError) as problem:
        raise ArtifactError(f"trace constants are damaged ({problem}); trace again") from problem
    for buffer, storage in storages.items():
        value = values.get(f"buffer.{buffer}")
        if value is None and buffer not in needed:
            continue
        if value is None or value.dtype != torch.uint8 or value.numel() != trace.buffers[buffer].bytes:
            raise ArtifactError(f"constant buffer {buffer}: its value is not in the trace; trace again")
        torch.empty(0, dtype=torch.uint8).set_(storage, 0, (value.numel(),), (1,)).copy_(value)


def _read_weights(trace: Trace, named: Sequence[Weight], path: Path) -> dict[str, torch.Tensor]:
    """The named weights from a safetensors file, after checking the names of all of the model's."""
    known = {alias: weight.name for weight in trace.weights for alias in (weight.name, *weight.aliases)}
    try:
        with safe_open(str(path), framework="pt") as file:
            keys = {known[key]: key for key in file.keys() if key in known}  # noqa: SIM118 (not a mapping)
            extra = sorted(set(file.keys()) - set(known))
            # Of a model that ranks share, a weight may be another rank's.
            if extra and "tensor_parallel" not in trace.info:
                raise InputError(
                    f"{path}: holds {extra[0]!r}, which the model lacks; pass this model's weights"
                )
            lacking = [
                w.name for w in trace.weights if w.name not in keys and w.init["kind"] not in DERIVED_KINDS
            ]
            if lacking:
                raise InputError(f"{path}: lacks weight {lacking[0]!r}; pass all of the model's weights")
            return {
                weight.name: _stored(file.get_tensor(keys[weight.name]), weight, path)
                for weight in named
                if weight.name in keys
            }
    except (OSError, SafetensorError) as problem:
        raise InputError(f"{path}: cannot be read as safetensors ({problem}); pass another file") from problem


def _stored(whole: torch.Tensor, weight: Weight, path: Path) -> torch.Tensor:
    """A weight of a file, or the part of it that a rank has."""
    part = weight.init.get("slice")
    if part is None:
        return whole
    if whole.dim() <= part["axis"] or whole.shape[part["axis"]] != part["extent"]:
        raise InputError(
            f"{path}: weight {weight.name!r} is {list(whole.shape)}, the trace has a part of {part['extent']} along"
            f" axis {part['axis']}; pass the unsharded model's weights"
        )
    return _cut(whole, part)


def _exported(trace: Trace, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Values of weights that the ``.pt2`` file holds which the trace was made from."""
    if not names:
        return {}
    # Late: of all that fill weights, only exported programs need their reader.
    from tessera_core.trace.inputs.pt2_archive import exported_weights

    path = Path(str(trace.info.get("factory", "")))
    return exported_weights(path, str(trace.info.get("factory_hash", "")), names)


def _check_like(value: torch.Tensor, reference: TensorRef, name: str, source: Path | str) -> None:
    found = f"{str(value.dtype)[6:]} {list(value.shape)}"
    expected = f"{reference.dtype} {list(reference.shape)}"
    if found != expected:
        raise InputError(
            f"{source}: weight {name!r} is {found}, the trace has {expected}; trace again with its dtype"
        )
