"""What one program's step did: its ops, its launches, and the guards on values that were read on the host."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from tessera_core.program.ir import Guard, Operand, TensorRef
from tessera_core.program.operators import TRUSTED_NAMESPACES
from tessera_core.trace.encode import encode, encoded_tensors, map_tensors, tensors_in
from tessera_core.trace.fake import VIEWS, call_sized, is_fake, strided_as_eager, view_as_eager
from tessera_core.trace.inner import InnerWork, Launch, run_watched
from tessera_core.trace.place import calling_place
from tessera_core.trace.registry import BufferEntry, Registry, dtype_name, is_lazy, storage_key
from tessera_core.trace.streams import Timeline
from tessera_formats.errors import ModelError, UntracedLaunchError

# Every element becomes a condition on each request; a larger input that is read on the host is data, no switch.
_MAX_GUARDED_ELEMENTS = 64
_WRITABLE = ("activation", "input", "state", "output")


@dataclass(slots=True, kw_only=True)
class RecordedOp:
    """One op as recorded; ``scope`` is the path of the module that called it, ``stream`` that it was issued on."""

    target: str
    schema: str
    arguments: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    operands: tuple[Operand, ...]
    scope: str
    stream: int


@dataclass(frozen=True, slots=True)
class BoundInput:
    """An input by name, and its view as it was before the step."""

    name: str
    view: TensorRef


@dataclass(slots=True)
class Recorder:
    """What one program's step did: its ops, and the guards that values read on the host gave rise to.

    ``inputs``: by buffer, those that still hold what they came with. ``host_reads``: by input, where it was read.
    ``hidden``: why launches inside custom ops are not among ``launches``. ``inside``: the op being looked into.
    """

    registry: Registry
    program: int
    fake_mode: FakeTensorMode | None
    inputs: dict[int, BoundInput] = field(default_factory=dict)
    host_reads: dict[str, str] = field(default_factory=dict)
    ops: list[RecordedOp] = field(default_factory=list)
    guards: list[Guard] = field(default_factory=list)
    scope: Callable[[], str] = lambda: ""
    names: dict[int, str] = field(default_factory=dict)
    streams: Timeline = field(default_factory=Timeline)
    launches: list[Launch] = field(default_factory=list)
    hidden: dict[str, None] = field(default_factory=dict)
    inside: InnerWork | None = None
    silent: bool = False

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Record nothing inside: what an op does within itself is the op's own affair."""
        before, self.silent = self.silent, True
        try:
            yield
        finally:
            self.silent = before

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the model's own or was made by a recorded op."""
        return self.registry.find(tensor) is not None or storage_key(tensor) in self.names

    def entry(self, tensor: torch.Tensor, op: str) -> BufferEntry:
        """The buffer of an argument; one that was never seen before is a constant."""
        found = self.registry.find(tensor)
        if found is None:
            name = self.names.get(storage_key(tensor), "")
            found = self.registry.add_constant(tensor, name=name, real=not is_fake(tensor))
        elif found.program is not None and found.program != self.program:
            raise ModelError(
                f"{op} at {calling_place()}: uses a tensor that an earlier program's step left behind;"
                " keep what lives across steps in the state"
            )
        return found

    def tensor(self, tensor: torch.Tensor, op: str) -> int:
        """The id of a tensor view."""
        if is_lazy(tensor):
            raise ModelError(
                f"{op} at {calling_place()}: works in place on a conjugate or negative view; work on the"
                " tensor that it is a view of, or on its resolve_conj() or resolve_neg()"
            )
        return self.registry.view(tensor, self.entry(tensor, op))

    def has_value(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's values are known while tracing."""
        if is_fake(tensor):
            return False
        found = self.registry.find(tensor)
        return self.fake_mode is None or found is None or found.real

    def call(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Execute an op, faked where an argument has no values."""
        with self.quiet():
            return self._call(func, args, kwargs)

    def looks_inside(self, func: OpOverload, found: Sequence[torch.Tensor]) -> bool:
        """Whether an op's own launches are to be noted: those of user code that runs for real."""
        return (
            func.namespace not in TRUSTED_NAMESPACES
            and self.fake_mode is None
            and "triton" in sys.modules
            and all(tensor.layout == torch.strided and not tensor.is_quantized for tensor in found)
        )

    def call_watched(self, func: OpOverload, args: Any, kwargs: Any) -> tuple[Any, InnerWork]:
        """Execute a custom op, and note what it does within itself."""
        self.inside = InnerWork()
        try:
            with self.quiet():
                return run_watched(func, args, kwargs, self.inside), self.inside
        finally:
            self.inside = None

    def keep_launches(self, op: str, inner: InnerWork) -> None:
        """Keep the launches of the op recorded last, if they say what it touches; else note why not."""
        found = inner.resolve(self.registry, len(self.ops) - 1) if inner.launches else []
        if not isinstance(found, str):
            self.launches += found
            return
        names = ", ".join(dict.fromkeys(launch.target for launch in inner.launches))
        self.hidden.setdefault(
            f"launches of {names} inside {op} have no rows, because {found}; its declaration says what it touches"
        )

    def _call(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        if self.fake_mode is None:
            return func(*args, **kwargs)
        found = tensors_in((args, kwargs))
        if all(self.has_value(tensor) for tensor in found):
            return call_sized(self.fake_mode, func, args, kwargs)
        originals: dict[int, torch.Tensor] = {}

        def convert(tensor: torch.Tensor) -> torch.Tensor:
            if is_fake(tensor):
                return tensor
            entry = self.entry(tensor, str(func))
            assert self.fake_mode is not None
            stand_in = self.fake_mode.from_tensor(tensor)
            self.registry.alias(stand_in, entry)
            originals[id(stand_in)] = tensor
            return stand_in

        converted, named = map_tensors(args, convert), map_tensors(kwargs, convert)
        with self.fake_mode:
            result = view_as_eager(*converted) if func in VIEWS else func(*converted, **named)
            result = strided_as_eager(func, converted, named, result)
        return map_tensors(result, lambda tensor: originals.get(id(tensor), tensor))

    def record(
        self,
        target: str,
        schema: str,
        arguments: Any,
        result: Any,
        operands: Callable[[], tuple[Operand, ...]],
        depends: bool,
    ) -> None:
        """Append an op whose arguments are encoded; fresh storages in ``result`` become activations."""
        inputs = tuple(encoded_tensors(arguments))
        outputs = []
        for tensor in tensors_in(result):
            entry = self.registry.find(tensor)
            if entry is None:
                entry = self.registry.add(
                    tensor,
                    program=self.program,
                    kind="activation",
                    name="",
                    depends=depends,
                    real=not is_fake(tensor),
                )
            outputs.append(self.registry.view(tensor, entry))
        op = RecordedOp(
            target=target,
            schema=schema,
            arguments=arguments,
            inputs=inputs,
            outputs=tuple(outputs),
            operands=(),
            scope=self.scope(),
            stream=self.streams.issue(target),
        )
        self.ops.append(op)
        op.operands = operands()

    def depends(self, tensors: list[torch.Tensor], op: str) -> bool:
        """Whether any of the tensors derives from weights, inputs or state."""
        return any(self.entry(tensor, op).depends for tensor in tensors)

    def mark_written(self, tensor: torch.Tensor, op: str, depends: bool, real: bool) -> None:
        """Note a write; only what belongs to the program may be written."""
        entry = self.entry(tensor, op)
        if entry.kind not in _WRITABLE:
            what = f"{entry.kind} {entry.name}" if entry.name else "a tensor made outside the step"
            raise ModelError(
                f"{op} at {calling_place()}: writes to {what}, which is no state of the model;"
                " declare it as state, or clone it first"
            )
        self.inputs.pop(entry.id, None)
        entry.depends = entry.depends or depends
        entry.real = entry.real and real

    def read_on_host(self, tensor: torch.Tensor, op: str) -> None:
        """A value was read on the host: allow it where it is constant, or guard it where it is an input."""
        place = calling_place()
        entry = self.entry(tensor, op)
        if not self.has_value(tensor):
            raise UntracedLaunchError(
                f"{op} at {place}: reads a value on the host that --fake does not have;"
                " trace without --fake, or compute it on the device"
            )
        if not entry.depends:
            return
        bound = self.inputs.get(entry.id)
        elements = None
        if bound is not None and tensor.numel() <= _MAX_GUARDED_ELEMENTS:
            with self.quiet(), _disable_current_modes():
                elements = _elements_of(bound.view, tensor)
        if bound is None or elements is None:
            raise UntracedLaunchError(
                f"{op} at {place}: reads a value on the host that cannot be checked before a request starts;"
                " compute it on the device, or take it from an integer input as that came in"
            )
        with self.quiet(), _disable_current_modes():
            values = tensor.detach().reshape(-1).tolist()
        self.host_reads.setdefault(bound.name, f"{op} at {place}")
        for element, value in zip(elements, values):
            guard = Guard(
                subject=f"input:{bound.name}",
                index=element,
                comparison="eq",
                value=int(value),
                reason=f"{op} read it on the host while tracing",
            )
            if guard not in self.guards:
                self.guards.append(guard)


def encode_named(kwargs: dict[str, Any], recorder: Recorder, op: str) -> dict[str, Any]:
    """Keyword arguments in JSON form."""
    return {name: encode(value, lambda t: recorder.tensor(t, op), op) for name, value in kwargs.items()}


def _elements_of(bound: TensorRef, tensor: torch.Tensor) -> list[int] | None:
    """For each element of a view, which element of the flattened input it is; None where it is none of them."""
    integral = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
    if not integral or dtype_name(tensor.dtype) != bound.dtype or is_lazy(tensor):
        return None
    places = _storage_offsets(bound.offset, bound.shape, bound.stride)
    read = _storage_offsets(int(tensor.storage_offset()), tensor.shape, tensor.stride())
    found = [torch.nonzero(places == offset).flatten() for offset in read]
    return [int(index[0]) for index in found] if all(index.numel() for index in found) else None


def _storage_offsets(offset: int, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Storage offsets, in elements, of a view's elements in logical order."""
    offsets = torch.tensor(offset)
    for extent, step in zip(shape, stride):
        offsets = offsets.unsqueeze(-1) + torch.arange(extent) * step
    return offsets.reshape(-1)
