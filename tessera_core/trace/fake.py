"""Tracing real sizes without their memory: tensors that have shapes, strides and storages but no values.

Weights, inputs and state are fake, and so is what derives from them. Any other tensor of up to 1 MiB is
real, so that constants and indices have values. A real tensor that a fake value was written to has lost its
values; the tracer then treats it as fake through a stand-in that shares its buffer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tessera_core.trace.encode import map_tensors, tensors_in

REAL_LIMIT_BYTES = 1 << 20
"""Largest storage that gets real values under ``--fake``: rotary tables and masks fit, weights do not."""


_CLONE = torch.ops.aten.clone.default

VIEWS = frozenset({torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default})
"""Operators that :func:`view_as_eager` stands for."""


def new_fake_mode() -> FakeTensorMode:
    """A mode whose tensors pretend to live on the CPU."""
    return FakeTensorMode(allow_non_fake_inputs=False)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no values."""
    return isinstance(tensor, FakeTensor)


def call_sized(fake_mode: FakeTensorMode, func: OpOverload, args: Any, kwargs: Any) -> Any:
    """Run an op without fake arguments: for real if what it makes is small, else faked.

    Arguments that are real tensors mean that the result is as real as they are.
    """
    if tensors_in((args, kwargs)):
        return func(*args, **kwargs)
    with fake_mode:
        shape_only = func(*args, **kwargs)
    made = tensors_in(shape_only)
    if sum(tensor.untyped_storage().nbytes() for tensor in made) > REAL_LIMIT_BYTES:
        return shape_only
    return func(*args, **kwargs)


def view_as_eager(tensor: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """``tensor.view(size)`` with the strides that eager execution gives to extents of one.

    Fake tensors take another way there, and a layout that looks contiguous to one and not to the other makes
    different operators follow (one matrix product, or one per request).
    """
    with _disable_current_modes():
        twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        stride = twin.view(size).stride()
        shape = twin.view(size).shape
    return tensor.as_strided(shape, stride, tensor.storage_offset())


def strided_as_eager(func: OpOverload, args: Any, kwargs: Any, result: Any) -> Any:
    """A pointwise operator's fake ``result`` with the strides that eager execution gives to extents of one.

    Eager execution makes a contiguous result from contiguous arguments of one shape; fake tensors follow the strides
    of an argument there. Nothing depends on these strides, but they are part of a program. A clone, pointwise by its
    tag alone, always keeps strides.
    """
    pointwise = torch.Tag.pointwise in func.tags and not func._schema.is_mutable and func is not _CLONE
    if not pointwise or not is_fake(result) or 1 not in result.shape:
        return result
    found = tensors_in((args, kwargs))
    if any(tensor.shape != result.shape or not tensor.is_contiguous() for tensor in (*found, result)):
        return result
    stride = torch.empty(result.shape, device="meta").stride()
    return result if stride == result.stride() else result.as_strided(result.shape, stride)


class BuildMode(TorchDispatchMode):
    """Active while a model, its state and its inputs are made under ``--fake``."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake_mode = fake_mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = tensors_in((args, kwargs))
        if any(is_fake(tensor) for tensor in found):
            return _with_converted(self.fake_mode, func, args, kwargs)
        return call_sized(self.fake_mode, func, args, kwargs)


@contextlib.contextmanager
def building(fake_mode: FakeTensorMode | None) -> Iterator[None]:
    """Make large tensors fake inside, if there is a fake mode at all; no gradients either way."""
    with torch.no_grad():
        if fake_mode is None:
            yield
        else:
            with BuildMode(fake_mode):
                yield


def _with_converted(fake_mode: FakeTensorMode, func: OpOverload, args: Any, kwargs: Any) -> Any:
    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if is_fake(tensor) else fake_mode.from_tensor(tensor)

    converted, named = map_tensors(args, convert), map_tensors(kwargs, convert)
    with fake_mode:
        return func(*converted, **named)
