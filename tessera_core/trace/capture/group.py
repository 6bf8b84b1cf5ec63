"""A kernel's ops as one function of tensors: what is compiled, captured and called.

The function takes the views of every buffer that exists before the kernel runs, writes in place what the ops
write in place, and returns the buffers that the ops make and that outlive the kernel, laid out as recorded.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tessera_core.program.ir import Op, Program, TensorRef, Trace
from tessera_core.program.memory import Memory, view_of
from tessera_core.program.operators import Template, decode_arguments, dtype_named
from tessera_core.program.replay import TRITON
from tessera_core.program.user_code import recorded_operator, triton_kernel
from tessera_core.trace.capture.views import same_layout, view_steps
from tessera_formats.errors import ArtifactError


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A function of tensors. ``inputs``: tensor ids of its arguments; ``results``: of what it returns.

    ``layouts``: shape and stride of each result, which is the whole buffer. ``native``: it launches Triton kernels
    as the user does, so it is called as it is and never compiled.
    """

    function: fx.GraphModule
    inputs: tuple[int, ...]
    results: tuple[int, ...]
    layouts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    native: bool

    def arguments(self, memory: Memory) -> list[torch.Tensor]:
        """The arguments as views of a memory's storages."""
        return [memory.view(tensor) for tensor in self.inputs]


def kernel_group(
    trace: Trace,
    program: Program,
    kernel: int,
    *,
    local: Collection[int],
    trusted: bool = False,
    device: str = "cuda",
) -> Group:
    """The function of one kernel; ``local``: buffers that nothing outside it touches."""
    return build_group(
        trace,
        program,
        [program.ops[op] for op in program.kernels[kernel].ops],
        local=local,
        trusted=trusted,
        device=device,
    )


def build_group(
    trace: Trace,
    program: Program,
    ops: Sequence[Op],
    *,
    local: Collection[int],
    trusted: bool = False,
    device: str = "cuda",
) -> Group:
    """The function of any ops of a program, in order; raises the errors of replay for a bad record."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    builder = _Builder(trace, program, trusted, torch.device(device), mode)
    with mode, torch.no_grad():
        for op in ops:
            builder.add(op)
    kept = [buffer for buffer in builder.made if buffer not in local]
    builder.graph.output(tuple(builder.made[buffer].node for buffer in kept))
    function = fx.GraphModule(torch.nn.Module(), builder.graph)
    return Group(
        function=function,
        inputs=tuple(builder.given[node] for node in builder.graph.nodes if node.op == "placeholder"),
        results=tuple(builder.made[buffer].reference.id for buffer in kept),
        layouts=tuple(
            (builder.made[buffer].reference.shape, builder.made[buffer].reference.stride) for buffer in kept
        ),
        native=any(op.target.startswith(TRITON) for op in ops),
    )


@dataclass(frozen=True, slots=True)
class _Made:
    """A buffer that an op made: its node, and how that is laid out (the id is of a recorded tensor)."""

    node: fx.Node
    reference: TensorRef


@dataclass(slots=True)
class _Builder:
    trace: Trace
    program: Program
    trusted: bool
    device: torch.device
    mode: FakeTensorMode
    graph: fx.Graph = field(default_factory=fx.Graph)
    given: dict[fx.Node, int] = field(default_factory=dict)
    made: dict[int, _Made] = field(default_factory=dict)
    views: dict[int, fx.Node] = field(default_factory=dict)
    fakes: dict[fx.Node, Any] = field(default_factory=dict)

    def add(self, op: Op) -> None:
        where = f"{self.program.name}, op {op.id} ({op.target})"
        template = decode_arguments(
            op.arguments, tensors=len(self.trace.tensors), device=self.device, where=where
        )
        positional, named = self._fill(template)
        if op.target.startswith(TRITON):
            kernel = triton_kernel(op, self.trace, self.trusted, where)
            launch = native_launch(kernel, op.arguments)
            self.graph.call_function(launch, tuple(positional), named)
            return
        overload = recorded_operator(op, self.trace, self.trusted)
        node = self._call(overload, positional, named)
        arguments = {self.trace.tensors[tensor].buffer for tensor in op.inputs}
        fresh = [(i, t) for i, t in enumerate(op.outputs) if self.trace.tensors[t].buffer not in arguments]
        if not fresh:
            return
        results = self._flatten(node)
        if len(results) != len(op.outputs):
            raise ArtifactError(
                f"{where}: returns {len(results)} tensors, not {len(op.outputs)}; trace again"
            )
        buffers = [self.trace.tensors[tensor].buffer for _, tensor in fresh]
        for index, tensor in fresh:
            shared = buffers.count(self.trace.tensors[tensor].buffer) > 1
            self._settle(results[index], self.trace.tensors[tensor], shared, where)

    def _call(self, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Node:
        node = self.graph.call_function(target, tuple(args), dict(kwargs))
        self.fakes[node] = target(*_map(list(args), self.fakes), **_map(dict(kwargs), self.fakes))
        return node

    def _fill(self, template: Template) -> tuple[list[Any], dict[str, Any]]:
        positional, named = list(template.positional), dict(template.named)
        for position, tensor in template.holes:
            positional[position] = self._view(tensor)
        for name, tensor in template.named_holes:
            named[name] = self._view(tensor)
        for position, tensors in template.nested:
            positional[position] = [None if t is None else self._view(t) for t in tensors]
        for name, tensors in template.named_nested:
            named[name] = [None if t is None else self._view(t) for t in tensors]
        return positional, named

    def _view(self, tensor: int) -> fx.Node:
        if tensor in self.views:
            return self.views[tensor]
        reference = self.trace.tensors[tensor]
        base = self.made.get(reference.buffer)
        self.views[tensor] = self._placeholder(reference) if base is None else self._inner(base, reference)
        return self.views[tensor]

    def _placeholder(self, reference: TensorRef) -> fx.Node:
        first = next((n for n in self.graph.nodes if n.op != "placeholder"), None)
        with self.graph.inserting_before(first):
            node = self.graph.placeholder(f"t{reference.id}")
        dtype = dtype_named(reference.dtype, f"tensor {reference.id}")
        extent = _extent(reference)
        flat = torch.empty(extent, dtype=dtype, device=self.device)
        self.fakes[node] = flat.as_strided(reference.shape, reference.stride, reference.offset)
        self.given[node] = reference.id
        return node

    def _inner(self, base: _Made, reference: TensorRef) -> fx.Node:
        """A view of a buffer that the group itself made."""
        if reference.dtype != base.reference.dtype:
            raise ArtifactError(
                f"tensor {reference.id}: views buffer {reference.buffer} as {reference.dtype}, which was made as"
                f" {base.reference.dtype}; compute with the tensor's own dtype, and trace again"
            )
        layout = (reference.shape, reference.stride, reference.offset)
        steps = view_steps(base.reference.shape, base.reference.stride, *layout)
        if steps is None:
            return self._call(torch.ops.aten.as_strided.default, (base.node, *map(_plain, layout)), {})
        node = base.node
        for name, arguments in steps:
            packet, overload = name.split(".")
            node = self._call(getattr(getattr(torch.ops.aten, packet), overload), (node, *arguments), {})
        return node

    def _flatten(self, node: fx.Node) -> list[fx.Node]:
        value = self.fakes[node]
        if isinstance(value, torch.Tensor):
            return [node]
        found: list[fx.Node] = []
        if isinstance(value, (list, tuple)):
            for index in range(len(value)):
                found += self._flatten(self._call(operator.getitem, (node, index), {}))
        return found

    def _settle(self, node: fx.Node, reference: TensorRef, shared: bool, where: str) -> None:
        """Keep a fresh result under the recorded layout and precision, copying only where the device's differs."""
        value: torch.Tensor = self.fakes[node]
        dtype = dtype_named(reference.dtype, f"tensor {reference.id}")
        # Devices differ in the precision of a norm's statistics.
        rounded = value.dtype != dtype and value.dtype.is_floating_point and dtype.is_floating_point
        if tuple(value.shape) != reference.shape or (value.dtype != dtype and not rounded):
            raise ArtifactError(
                f"{where}: makes {value.dtype} {tuple(value.shape)} on {self.device.type}, {reference.dtype}"
                f" {reference.shape} in the trace; trace again"
            )
        bytes_ = self.trace.buffers[reference.buffer].bytes
        whole = _extent(reference) * reference.item_bytes == bytes_ and reference.offset == 0
        if (
            whole
            and not shared
            and not rounded
            and same_layout(value.shape, value.stride(), reference.shape, reference.stride)
        ):
            self.made[reference.buffer] = _Made(node, reference)
            self.views[reference.id] = node
            return
        if reference.buffer not in self.made:
            self._allocate(reference, bytes_, whole and not shared)
        self._call(torch.ops.aten.copy_.default, (self._view(reference.id), node), {})

    def _allocate(self, reference: TensorRef, size: int, whole: bool) -> None:
        """Storage for a buffer: laid out as its only tensor where that fills it, else flat."""
        options = {"dtype": dtype_named(reference.dtype, f"tensor {reference.id}"), "device": self.device}
        shape, stride = (
            (reference.shape, reference.stride) if whole else ((size // reference.item_bytes,), (1,))
        )
        node = self._call(torch.ops.aten.empty_strided.default, (list(shape), list(stride)), options)
        layout = TensorRef(
            id=reference.id,
            buffer=reference.buffer,
            dtype=reference.dtype,
            shape=shape,
            stride=stride,
            offset=0,
        )
        self.made[reference.buffer] = _Made(node, layout)


def native_launch(kernel: Any, arguments: Mapping[str, Any]) -> Callable[..., None]:
    """A function that launches ``kernel`` with the recorded grid, constexprs and options."""
    names = tuple(kernel.arg_names)
    grid = tuple(arguments["grid"])
    fixed = {**arguments["constexprs"], **arguments["options"]}

    def launch(*args: Any, **kwargs: Any) -> None:
        kernel[grid](**dict(zip(names, args)), **kwargs, **fixed)

    return launch


def store_results(group: Group, memory: Memory, results: Sequence[torch.Tensor]) -> None:
    """Make what the function returned the content of its buffers; raises as :func:`check_results`."""
    check_results(group, memory.trace, results)
    for tensor, value in zip(group.results, results, strict=True):
        reference = memory.trace.tensors[tensor]
        if reference.buffer in memory.fixed:
            target = view_of(memory.storage(reference.buffer), reference)
            target.copy_(value)
        else:
            memory.bind(reference.buffer, value.untyped_storage())


def check_results(group: Group, trace: Trace, results: Sequence[torch.Tensor]) -> None:
    """Refuse results that aren't whole buffers as recorded, such as views of padded ones: launches write there.

    Raises :class:`ArtifactError`.
    """
    for tensor, (shape, stride), value in zip(group.results, group.layouts, results, strict=True):
        buffer = trace.tensors[tensor].buffer
        size = trace.buffers[buffer].bytes
        whole = not value.storage_offset() and value.untyped_storage().nbytes() >= size
        if not whole or not same_layout(value.shape, value.stride(), shape, stride):
            raise ArtifactError(
                f"buffer {buffer}: comes back as {tuple(value.shape)} with strides {tuple(value.stride())} at"
                f" offset {value.storage_offset()}, recorded are {shape} with {stride}; try --no-compile, and"
                " report this as a bug of the capture"
            )


def _extent(reference: TensorRef) -> int:
    """Elements from the storage's start to the view's end."""
    if not reference.elements:
        return reference.offset
    reach = sum((n - 1) * step for n, step in zip(reference.shape, reference.stride))
    return reference.offset + reach + 1


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _map(value: Any, fakes: Mapping[fx.Node, Any]) -> Any:
    if isinstance(value, fx.Node):
        return fakes[value]
    if isinstance(value, list):
        return [_map(item, fakes) for item in value]
    if isinstance(value, dict):
        return {key: _map(item, fakes) for key, item in value.items()}
    return value
