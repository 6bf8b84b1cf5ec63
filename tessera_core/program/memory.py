"""The storages of one slot on one device, and the cached tensor views of them that replay works on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from tessera_core.program.ir import TensorRef, Trace
from tessera_core.program.operators import dtype_named
from tessera_formats.errors import ArtifactError


class Memory:
    """Storages by buffer id, and views by tensor id, of one slot on one device.

    Weights are shared between slots by binding the same storage in several memories. A buffer in ``fixed``
    keeps the storage that is bound to it: an op's fresh result is copied there (receive regions in shared
    memory, outputs that somebody holds a pointer to). Any other buffer is rebound to the op's own result.
    ``views``, ``bases`` and ``tensors_of`` are replay's working arrays; everyone else goes through the methods.
    """

    __slots__ = ("_storages", "bases", "device", "fixed", "tensors_of", "trace", "views")

    def __init__(self, trace: Trace, *, fixed: Iterable[int] = (), device: str = "cpu") -> None:
        self.trace = trace
        self.device = torch.device(device)
        self.fixed = frozenset(fixed)
        self.views: list[torch.Tensor | None] = [None] * len(trace.tensors)
        self.bases: list[torch.Tensor | None] = [None] * len(trace.buffers)
        self._storages: list[torch.UntypedStorage | None] = [None] * len(trace.buffers)
        self.tensors_of: list[list[int]] = [[] for _ in trace.buffers]
        for tensor in trace.tensors:
            self.tensors_of[tensor.buffer].append(tensor.id)

    def bind(self, buffer: int, storage: torch.UntypedStorage) -> None:
        """Make ``storage`` the bytes of ``buffer``; it must hold at least the buffer's recorded size."""
        recorded = self.trace.buffers[buffer]
        if storage.nbytes() < recorded.bytes:
            raise ArtifactError(
                f"buffer {buffer} ({recorded.name or recorded.kind}): needs {recorded.bytes} bytes,"
                f" the storage bound to it has {storage.nbytes()}; trace again"
            )
        self.release(buffer)
        self._storages[buffer] = storage

    def bind_all(self, storages: Mapping[int, torch.UntypedStorage]) -> None:
        """Bind every buffer of ``storages``."""
        for buffer, storage in storages.items():
            self.bind(buffer, storage)

    def is_bound(self, buffer: int) -> bool:
        """Whether the buffer has bytes here."""
        return self._storages[buffer] is not None or self.bases[buffer] is not None

    def release(self, buffer: int) -> None:
        """Forget the buffer's storage and its views."""
        self._storages[buffer] = None
        self.bases[buffer] = None
        for tensor in self.tensors_of[buffer]:
            self.views[tensor] = None

    def storage(self, buffer: int) -> torch.UntypedStorage:
        """The buffer's bytes, laid out as recorded."""
        base = self.bases[buffer]
        if base is not None:
            return base.untyped_storage()
        storage = self._storages[buffer]
        if storage is None:
            recorded = self.trace.buffers[buffer]
            raise ArtifactError(
                f"buffer {buffer} ({recorded.name or recorded.kind}): is used before anything defines it;"
                " trace again"
            )
        return storage

    def view(self, tensor: int) -> torch.Tensor:
        """The tensor as a view of its buffer's storage; cached until the buffer is bound anew."""
        view = self.views[tensor]
        if view is None:
            reference = self.trace.tensors[tensor]
            base = self.bases[reference.buffer]
            if base is not None and str(base.dtype)[6:] == reference.dtype:
                view = base.as_strided(reference.shape, reference.stride, reference.offset)
            else:
                view = view_of(self.storage(reference.buffer), reference)
            self.views[tensor] = view
        return view

    def define(self, tensor: int, value: torch.Tensor) -> None:
        """Make ``value``, laid out as the tensor is recorded, the new content of the tensor's buffer."""
        buffer = self.trace.tensors[tensor].buffer
        if buffer in self.fixed:
            self.view(tensor).copy_(value)
            return
        self.release(buffer)
        self.bases[buffer] = value
        self.views[tensor] = value


def view_of(storage: torch.UntypedStorage, reference: TensorRef) -> torch.Tensor:
    """A recorded tensor as a view of ``storage``; raises :class:`ArtifactError` if it reaches past its end."""
    dtype = dtype_named(reference.dtype, f"tensor {reference.id}")
    box = reference.box()
    if box is not None and box.high > storage.nbytes():
        raise ArtifactError(
            f"tensor {reference.id}: reaches byte {box.high} of buffer {reference.buffer}, which has"
            f" {storage.nbytes()}; trace again"
        )
    return torch.empty(0, dtype=dtype, device=storage.device).set_(
        storage, reference.offset, reference.shape, reference.stride
    )


def allocate(trace: Trace, buffer: int, device: str = "cpu") -> torch.UntypedStorage:
    """A fresh storage for a buffer, of its recorded size in bytes; zeroed if it is state."""
    recorded = trace.buffers[buffer]
    make = torch.zeros if recorded.kind == "state" else torch.empty
    return make(recorded.bytes, dtype=torch.uint8, device=device).untyped_storage()
