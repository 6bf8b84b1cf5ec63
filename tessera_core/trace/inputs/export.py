"""A program that ``torch.export.save`` wrote, as a model that can be traced.

The graph is interpreted node by node under the recorder, so that its ops are recorded as any model's are. Buffers
that it writes are its state, its other parameters and buffers are weights, which replay reads from the file again.
Sizes that the export left open take the values of its example inputs, or what the request asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from tessera_core.program.ir import ITEM_BYTES, Guard, State
from tessera_core.program.weights import fill
from tessera_core.trace.fake import is_fake
from tessera_core.trace.inputs.pt2_archive import NO_EFFECT, file_hash, open_export
from tessera_core.trace.request import ProgramRequest
from tessera_formats.errors import InputError, ModelError

PHASE = "step"
"""What a program is called that nobody has named a phase of."""

_DATA_DEPENDENT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Scope(torch.nn.Module):
    """A module of the exported model: holds its weights, and runs what ran inside it, so that hooks see its name."""

    def forward(self, run: Callable[[], Any]) -> Any:
        """Call ``run``."""
        return run()


@dataclass(slots=True)
class ExportedModel:
    """A :class:`~tessera_core.trace.model.TraceableModel` around an exported program.

    ``module`` is a tree of :class:`Scope`; ``values`` holds buffers, constants and example inputs by placeholder.
    """

    path: Path
    program: torch.export.ExportedProgram
    module: torch.nn.Module
    recipes: Mapping[str, dict[str, Any]] | None
    states: tuple[State, ...]
    notes: tuple[str, ...]
    feeds: Mapping[str, str] = field(default_factory=dict)
    _given: dict[str, Any] = field(default_factory=dict)
    _initial: dict[str, torch.Tensor] = field(default_factory=dict)
    _state_of: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, fake_mode: FakeTensorMode | None) -> ExportedModel:
        """Read ``path``; raises :class:`InputError` and :class:`ModelError` for what cannot be read or traced."""
        program = open_export(path)
        _check_graph(path, program)
        written = _written_placeholders(program)
        module, state_of, initial = Scope(), {}, {}
        given: dict[str, Any] = {}
        recipes: dict[str, dict[str, Any]] = {}
        states = []
        for spec in program.graph_signature.input_specs:
            name, target = getattr(spec.arg, "name", ""), spec.target
            if isinstance(spec.arg, TensorArgument) and target is not None:
                persistent = spec.kind is InputKind.PARAMETER or spec.persistent is True
                value = (program.state_dict if persistent else program.constants)[target].detach()
                _check_dtype(path, target, value)
                if name in written:
                    states.append(
                        State(
                            name=target,
                            batch_axis=None,
                            sequence_axis=None,
                            init=_recipe(path, target, value),
                        )
                    )
                    state_of[name], initial[target] = target, value
                elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                    if fake_mode is not None and persistent:
                        value = fake_mode.from_tensor(value)
                    given[name] = _register(module, target, value, spec.kind, persistent)
                    if persistent:
                        recipes[target] = {"kind": "export"}
                else:
                    given[name] = value
            elif isinstance(spec.arg, ConstantArgument):
                given[name] = spec.arg.value
            elif not isinstance(spec.arg, TensorArgument):
                raise ModelError(
                    f"{path}: takes {name or 'an input'}, which is no tensor; export it with that value fixed"
                )
        return cls(
            path=path,
            program=program,
            module=module,
            recipes=recipes,
            states=tuple(states),
            notes=_notes(program),
            _given=given,
            _initial=initial,
            _state_of=state_of,
        )

    @property
    def origin(self) -> dict[str, str]:
        """What the manifest says about where the model comes from."""
        path = self.path.resolve()
        return {
            "model": str(self.path),
            "source": "export",
            "factory": str(path),
            "factory_hash": file_hash(path),
        }

    def own_request(self) -> ProgramRequest:
        """The program that the export's own sizes make: batch and context are the extents of its first input."""
        shape = next((tensor.shape for tensor in self._inputs({}).values()), ())
        extents = [int(extent) for extent in shape] + [1, 1]
        return ProgramRequest(PHASE, max(1, extents[0]), max(1, extents[1]))

    def make_state(self, request: ProgramRequest) -> dict[str, torch.Tensor]:
        """See the protocol; a buffer has the values that it was exported with."""
        made = {}
        for state in self.states:
            like = self._initial[state.name]
            fresh = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
            if not is_fake(fresh):
                fill(fresh, state.name, state.init, 0)
            made[state.name] = fresh
        return made

    def make_inputs(self, request: ProgramRequest) -> dict[str, torch.Tensor]:
        """See the protocol: the example inputs where the sizes are theirs, else zeros."""
        return self._inputs(self._sizes(request))

    def step(
        self, request: ProgramRequest, inputs: dict[str, torch.Tensor], state: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """See the protocol."""
        given = self._given | inputs | {name: state[target] for name, target in self._state_of.items()}
        results = _Interpreter(self.program.graph_module, self.module).run(
            *(given[getattr(spec.arg, "name", "")] for spec in self.program.graph_signature.input_specs)
        )
        outputs: list[Any] = []
        for spec, value in zip(self.program.graph_signature.output_specs, results, strict=True):
            match spec.kind:
                case OutputKind.USER_OUTPUT:
                    outputs.append(value)
                case OutputKind.BUFFER_MUTATION:
                    state[str(spec.target)].copy_(value)
                case OutputKind.USER_INPUT_MUTATION:
                    inputs[str(spec.target)].copy_(value)
                case _:
                    raise ModelError(f"{self.path}: was exported for training; export the model in eval mode")
        names = _output_names(self.program, len(outputs))
        return {name: value for name, value in zip(names, outputs) if isinstance(value, torch.Tensor)}

    def guards(self, request: ProgramRequest) -> tuple[Guard, ...]:
        """What the request says of lengths: the program itself does not know its cache's capacity."""
        if request.phase == "prefill":
            subject, comparison, value = "prompt_tokens", "eq", request.context
        elif request.phase == "decode":
            subject, comparison, value = "total_tokens", "le", request.context + 1
        else:
            return ()
        reason = f"the program was named with a context of {request.context}"
        return (Guard(subject=subject, index=None, comparison=comparison, value=value, reason=reason),)  # type: ignore[arg-type]

    def _user_inputs(self) -> Iterator[tuple[str, Any]]:
        """Placeholder name and traced value (with symbolic extents) of each tensor that the caller passes."""
        values = {
            node.name: node.meta.get("val") for node in self.program.graph.nodes if node.op == "placeholder"
        }
        for spec in self.program.graph_signature.input_specs:
            if spec.kind is InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument):
                yield spec.arg.name, values[spec.arg.name]

    def _inputs(self, sizes: Mapping[Any, int]) -> dict[str, torch.Tensor]:
        examples = pytree.tree_leaves(self.program.example_inputs or ())
        tensors = [leaf for leaf in examples if isinstance(leaf, torch.Tensor)]
        known = {**self._examples(), **sizes}
        made = {}
        for index, (name, value) in enumerate(self._user_inputs()):
            _check_dtype(self.path, name, value)
            shape = [_extent(self.path, extent, known) for extent in value.shape]
            example = tensors[index] if index < len(tensors) else None
            if example is not None and list(example.shape) == shape and example.dtype == value.dtype:
                made[name] = example.detach().clone()
            else:
                made[name] = torch.zeros(shape, dtype=value.dtype)
        return made

    def _examples(self) -> dict[Any, int]:
        """Open sizes as the example inputs had them."""
        found = {}
        for _, value in self._user_inputs():
            for extent in value.shape:
                symbol = _symbol(extent)
                if symbol is not None and extent.node.hint is not None:
                    found[symbol] = int(extent.node.hint)
        return found

    def _sizes(self, request: ProgramRequest) -> dict[Any, int]:
        """Open sizes as the request wants them: the first input's leading one is the batch, the next the context."""
        open_sizes: list[Any] = []
        batch, static = None, None
        for _, value in self._user_inputs():
            for axis, extent in enumerate(value.shape):
                symbol = _symbol(extent)
                if symbol is None:
                    static = int(extent) if batch is None and static is None and axis == 0 else static
                elif axis == 0 and batch is None and static is None:
                    batch = symbol
                elif symbol != batch and symbol not in open_sizes:
                    open_sizes.append(symbol)
        own = self.own_request()
        if batch is None and static is not None and request.batch != static:
            raise InputError(
                f"{self.path}: was exported for a batch of {static} (the first extent of its first input), not"
                f" {request.batch}; ask for batch={static}, or export it with that size left open"
            )
        sizes = {} if batch is None else {batch: request.batch}
        if open_sizes and request.context != own.context:
            sizes[open_sizes[0]] = request.context
        for symbol, size in sizes.items():
            bounds = self.program.range_constraints.get(symbol)
            if bounds is not None and not int(bounds.lower) <= size <= bounds.upper:
                raise InputError(
                    f"{self.path}: was exported for {symbol} from {bounds.lower} to {bounds.upper}, not {size};"
                    " ask for a size in that range"
                )
        return sizes


class _Interpreter(torch.fx.Interpreter):
    """Runs the graph, each node inside the scopes of the modules that it came from; checks are left out."""

    def __init__(self, graph: torch.fx.GraphModule, module: torch.nn.Module) -> None:
        super().__init__(graph)
        self.scopes = dict(module.named_modules())

    def run_node(self, n: torch.fx.Node) -> Any:
        """See the base class."""
        if _base(n.target) in NO_EFFECT:
            return None
        scope = self.scopes.get(_scope(n))
        return super().run_node(n) if scope is None else scope(lambda: super(_Interpreter, self).run_node(n))


def _scope(node: torch.fx.Node) -> str:
    """Qualified name of the innermost module that a node came from."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(entry[0]) for entry in stack.values()]
    return paths[-1] if paths else ""


def _base(target: Any) -> str:
    return str(target._schema.name).rpartition("::")[2] if isinstance(target, torch._ops.OpOverload) else ""


def _register(
    module: Scope, target: str, value: torch.Tensor, kind: InputKind, persistent: bool
) -> torch.Tensor:
    """Put a weight into the tree under its qualified name; tied weights stay one storage."""
    *path, last = target.split(".")
    owner = module
    for part in path:
        if part not in owner._modules:
            owner.add_module(part, Scope())
        owner = owner._modules[part]  # type: ignore[assignment]
    if kind is InputKind.PARAMETER:
        value = torch.nn.Parameter(value, requires_grad=False)
        owner.register_parameter(last, value)
    else:
        owner.register_buffer(last, value, persistent=persistent)
    return value


def _check_graph(path: Path, program: torch.export.ExportedProgram) -> None:
    for node in program.graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or _base(target) in NO_EFFECT:
            continue
        if any(tag in target.tags for tag in _DATA_DEPENDENT):
            scope = _scope(node)
            place = f" in {scope}" if scope else ""
            raise ModelError(
                f"{path}: {target}{place} has a result that depends on values, which only a run knows; use a mask"
                " or torch.where instead, and export again"
            )
        drawn = torch.Tag.nondeterministic_seeded in target.tags
        if drawn and "dropout" in str(target) and node.args[2:3] == (True,):
            raise ModelError(f"{path}: {target} draws random numbers; export the model in eval mode")


def _check_dtype(path: Path, name: str, value: torch.Tensor) -> None:
    if str(value.dtype).removeprefix("torch.") not in ITEM_BYTES:
        raise ModelError(
            f"{path}: {name} is of dtype {str(value.dtype).removeprefix('torch.')}, which cannot be traced; convert it"
            f" to one of {', '.join(ITEM_BYTES)}"
        )


def _written_placeholders(program: torch.export.ExportedProgram) -> frozenset[str]:
    """Names of the placeholders that the program writes: by its signature, or by an op on one or on a view of it."""
    by_target = {spec.target: getattr(spec.arg, "name", "") for spec in program.graph_signature.input_specs}
    written = {by_target[name] for name in program.graph_signature.buffers_to_mutate.values()}
    root = {node: node for node in program.graph.nodes if node.op == "placeholder"}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        schema = getattr(node.target, "_schema", None)
        given = [argument for argument in node.all_input_nodes if argument in root]
        if schema is None:
            if given and getattr(node.target, "__name__", "") == "getitem":
                root[node] = root[given[0]]
            continue
        values = dict(zip([argument.name for argument in schema.arguments], node.args)) | dict(node.kwargs)
        for argument in schema.arguments:
            value = values.get(argument.name)
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if not isinstance(item, torch.fx.Node) or item not in root or argument.alias_info is None:
                    continue
                if argument.alias_info.is_write:
                    written.add(root[item].name)
                if any(result.alias_info is not None for result in schema.returns):
                    root[node] = root[item]
    return frozenset(written)


def _recipe(path: Path, name: str, value: torch.Tensor) -> dict[str, Any]:
    """How a fresh state looks, from the values that the buffer was exported with."""
    if value.numel() == 0 or not bool(value.any()):
        return {"kind": "zeros"}
    first = value.reshape(-1)[0]
    if bool((value == first).all()):
        return {"kind": "full", "value": first.item()}
    if value.dim() == 1 and not value.dtype.is_floating_point:
        start, step = int(first), int(value[1]) - int(first)
        if torch.equal(value, torch.arange(value.numel(), dtype=value.dtype) * step + start):
            return {"kind": "arange", "start": start, "step": step}
    raise ModelError(
        f"{path}: state {name} starts with values that are neither equal nor a range; export it with a state that"
        " starts so, or trace the model's own code as FILE.py:FACTORY"
    )


def _symbol(extent: Any) -> Any:
    """The symbol that an open extent is; None for a fixed one or an expression."""
    if not isinstance(extent, torch.SymInt):
        return None
    expression = extent.node.expr
    return expression if expression.is_Symbol else None


def _extent(path: Path, extent: Any, sizes: Mapping[Any, int]) -> int:
    """A number for an extent, from those of its symbols."""
    if not isinstance(extent, torch.SymInt):
        return int(extent)
    found = extent.node.expr.subs(sizes)
    if not found.is_number:
        raise ModelError(f"{path}: nothing says how large {extent} is; export it with example inputs")
    return int(found)


def _output_names(program: torch.export.ExportedProgram, count: int) -> list[str]:
    """``logits`` for an entry of a dictionary, ``output.0`` for one of a tuple, ``output`` for the only one."""
    spec = program.call_spec.out_spec
    if spec is None or spec.num_leaves != count:
        return [f"output.{index}" for index in range(count)]
    nested = pytree.tree_unflatten(list(range(count)), spec)
    paths, _ = pytree.tree_flatten_with_path(nested)
    names = []
    for path, _ in paths:
        parts = [str(getattr(key, "key", getattr(key, "idx", ""))) for key in path]
        named = bool(path) and isinstance(path[0], pytree.MappingKey)
        names.append(".".join(parts if named else ["output", *parts]) if count > 1 or named else "output")
    return names


def _notes(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    checks = sorted({str(n.target) for n in program.graph.nodes if _base(n.target) in NO_EFFECT})
    return tuple(f"{name} of the exported program is left out: it only checks" for name in checks)
