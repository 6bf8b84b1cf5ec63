"""Which storage is which: the buffers and tensor views of a trace while it is being recorded.

Storages are known by the address of their C++ object and are kept alive as long as the registry lives, or
addresses would be used again. Weights and constants are shared by all programs; everything else belongs to
one. Copied storages (a real tensor seen as a fake one) may stand for the same buffer.
"""

from __future__ import annotations

import builtins
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tessera_core.program.ir import ITEM_BYTES, Buffer, BufferKind, TensorRef
from tessera_formats.errors import ModelError


@dataclass(slots=True)
class BufferEntry:
    """A buffer under construction.

    ``depends``: its values derive from weights, inputs or state, so that they are not known before a run.
    ``real``: its values exist while tracing. ``value``: the bytes of a constant.
    """

    id: int
    program: int | None
    kind: BufferKind
    bytes: int
    name: str
    depends: bool
    real: bool
    value: builtins.bytes | None = None

    def freeze(self, number: int) -> Buffer:
        """The finished buffer under its final id."""
        return Buffer(
            id=number, program=self.program, kind=self.kind, bytes=self.bytes, name=self.name, real=self.real
        )


@dataclass(slots=True)
class Registry:
    """All buffers and tensor views of a trace."""

    buffers: list[BufferEntry] = field(default_factory=list)
    tensors: list[TensorRef] = field(default_factory=list)
    _by_storage: dict[int, BufferEntry] = field(default_factory=dict)
    _alive: list[tuple[int, torch.UntypedStorage]] = field(default_factory=list)
    _views: dict[tuple[object, ...], int] = field(default_factory=dict)
    _constants: dict[tuple[int, str], BufferEntry] = field(default_factory=dict)

    def find(self, tensor: torch.Tensor) -> BufferEntry | None:
        """The buffer that a tensor lies in, or None if its storage was never seen."""
        return self._by_storage.get(storage_key(tensor))

    def add(
        self,
        tensor: torch.Tensor,
        *,
        program: int | None,
        kind: BufferKind,
        name: str,
        depends: bool,
        real: bool,
    ) -> BufferEntry:
        """Register the storage of ``tensor`` as a new buffer."""
        storage = tensor.untyped_storage()
        entry = BufferEntry(len(self.buffers), program, kind, storage.nbytes(), name, depends, real, None)
        self.buffers.append(entry)
        self._keep(storage, entry)
        return entry

    def add_constant(self, tensor: torch.Tensor, *, name: str, real: bool) -> BufferEntry:
        """Register a tensor made outside the recorded ops; its bytes are copied now, equal ones are shared."""
        if not real:
            return self.add(tensor, program=None, kind="constant", name=name, depends=True, real=False)
        value = storage_bytes(tensor.untyped_storage())
        key = (len(value), hashlib.sha256(value).hexdigest())
        entry = self._constants.get(key)
        if entry is None:
            entry = self.add(tensor, program=None, kind="constant", name=name, depends=False, real=True)
            entry.value = value
            self._constants[key] = entry
        else:
            self._keep(tensor.untyped_storage(), entry)
        return entry

    def alias(self, tensor: torch.Tensor, entry: BufferEntry) -> None:
        """Let the storage of ``tensor`` stand for a buffer that is known already."""
        if storage_key(tensor) not in self._by_storage:
            self._keep(tensor.untyped_storage(), entry)

    def view(self, tensor: torch.Tensor, entry: BufferEntry) -> int:
        """The id of the tensor view ``tensor`` of buffer ``entry``; raises :class:`ModelError` for a lazy one."""
        if is_lazy(tensor):
            raise ModelError(
                f"{entry.kind} {entry.name or entry.id}: is a conjugate or negative view;"
                " make it a tensor of its own with resolve_conj() or resolve_neg()"
            )
        dtype = dtype_name(tensor.dtype)
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        key = (entry.id, dtype, shape, stride, int(tensor.storage_offset()))
        number = self._views.get(key)
        if number is None:
            number = self._views[key] = len(self.tensors)
            self.tensors.append(
                TensorRef(id=number, buffer=entry.id, dtype=dtype, shape=shape, stride=stride, offset=key[4])
            )
        return number

    def keep_values(self, buffer: int) -> None:
        """Put the present bytes of a real buffer into the trace."""
        storage = next(storage for number, storage in self._alive if number == buffer)
        self.buffers[buffer].value = storage_bytes(storage)

    def constants(self) -> Mapping[int, bytes]:
        """Values of the constants by buffer id."""
        return {entry.id: entry.value for entry in self.buffers if entry.value is not None}

    def _keep(self, storage: torch.UntypedStorage, entry: BufferEntry) -> None:
        self._alive.append((entry.id, storage))
        self._by_storage[storage._cdata] = entry


def form_problem(tensor: torch.Tensor) -> str | None:
    """What keeps a tensor out of a trace, and what to do: a dense tensor of a known dtype on the CPU has none."""
    if tensor.is_nested:
        return "a nested tensor; pad it into a dense one"
    if tensor.layout != torch.strided:
        return f"a tensor of layout {str(tensor.layout).removeprefix('torch.')}; make it dense"
    if tensor.is_quantized:
        return f"a quantised tensor ({_name(tensor.dtype)}); keep integers and scales as tensors of their own"
    if tensor.device.type != "cpu":
        return f"a tensor on device {tensor.device}; make it on the CPU (--fake takes no memory; a nested one: pad it)"
    if _name(tensor.dtype) not in ITEM_BYTES:
        return f"a tensor of dtype {_name(tensor.dtype)}; convert it to one of {', '.join(ITEM_BYTES)}"
    return None


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether values differ from those in the storage, by a conjugation or a sign still to be applied."""
    return tensor.is_conj() or tensor.is_neg()


def storage_key(tensor: torch.Tensor) -> int:
    """What tells storages apart while they are alive."""
    key: int = tensor.untyped_storage()._cdata
    return key


def storage_bytes(storage: torch.UntypedStorage) -> bytes:
    """The raw bytes of a real storage."""
    with _disable_current_modes():
        flat = torch.empty(0, dtype=torch.uint8).set_(storage)
        return bytes(flat.numpy().tobytes())


def dtype_name(dtype: torch.dtype) -> str:
    """PyTorch's name without ``torch.``; raises :class:`ModelError` for one that a trace cannot hold."""
    name = _name(dtype)
    if name not in ITEM_BYTES:
        raise ModelError(
            f"dtype {name}: cannot be traced; convert the tensor to one of {', '.join(ITEM_BYTES)}"
        )
    return name


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
