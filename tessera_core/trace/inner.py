"""Launches of Triton kernels that a custom op makes within itself, and whether they are all that it does.

The op is what is recorded, with the accesses that its schema declares. Its launches are kept beside it, pointing
into the op's tensors or into memory that it allocated for itself. Only where the op does nothing else but
allocate and look at tensors do they say what the op touches; otherwise the declaration stands alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from tessera_core.trace.encode import tensors_in
from tessera_core.trace.operators import is_allocation, is_view
from tessera_core.trace.registry import Registry, dtype_name, storage_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """A tensor argument of a launch: into a buffer, or into a workspace of the op that makes the launch."""

    dtype: str
    byte_offset: int
    buffer: int | None = None
    workspace: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A launch of a user's Triton kernel: op index, kernel, arguments by parameter, grid and options.

    Tensors among ``arguments`` are :class:`Pointer`. ``workspaces``: bytes of each that the op's launches share.
    """

    op: int
    kernel: Any
    arguments: dict[str, Any]
    grid: tuple[int, int, int]
    options: dict[str, Any]
    workspaces: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class InnerLaunch:
    """A launch as it was made, with the tensors themselves."""

    target: str
    kernel: Any
    arguments: dict[str, Any]
    grid: tuple[int, int, int]
    options: dict[str, Any]


@dataclass(slots=True)
class InnerWork:
    """What an op did within itself. ``others``: operators that compute, in order of first use."""

    launches: list[InnerLaunch] = field(default_factory=list)
    others: dict[str, None] = field(default_factory=dict)
    allocated: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    def resolve(self, registry: Registry, op: int) -> list[Launch] | str:
        """The launches, with tensors told apart by what they lie in; or why they do not say what the op touches."""
        if self.others:
            return f"it also runs {', '.join(self.others)}"
        numbers: dict[int, int] = {}
        resolved = []
        for launch in self.launches:
            arguments = {}
            for name, value in launch.arguments.items():
                if isinstance(value, torch.Tensor):
                    pointer = self._pointer(value, registry, numbers)
                    if pointer is None:
                        return f"{name} of {launch.target} is neither an argument of the op nor made by it"
                    value = pointer
                arguments[name] = value
            resolved.append((launch, arguments))
        workspaces = tuple(self.allocated[key].nbytes() for key in numbers)
        return [
            Launch(
                op=op,
                kernel=launch.kernel,
                arguments=arguments,
                grid=launch.grid,
                options=launch.options,
                workspaces=workspaces,
            )
            for launch, arguments in resolved
        ]

    def _pointer(self, tensor: torch.Tensor, registry: Registry, numbers: dict[int, int]) -> Pointer | None:
        key, entry = storage_key(tensor), registry.find(tensor)
        if entry is None and key not in self.allocated:
            return None
        return Pointer(
            dtype=dtype_name(tensor.dtype),
            byte_offset=int(tensor.storage_offset()) * tensor.element_size(),
            buffer=None if entry is None else entry.id,
            workspace=numbers.setdefault(key, len(numbers)) if entry is None else None,
        )


class InnerMode(TorchDispatchMode):
    """Notes in an :class:`InnerWork` what an op's implementation calls."""

    def __init__(self, work: InnerWork) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_allocation(str(func)):
            self.work.allocated |= {storage_key(t): t.untyped_storage() for t in tensors_in(result)}
        elif not is_view(func):
            self.work.others.setdefault(str(func))
        return result


def run_watched(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], work: InnerWork) -> Any:
    """Call a custom op's CPU implementation, and note in ``work`` what it does within itself."""
    with InnerMode(work):
        # Below the modes, which would see the op once more and nothing of what is in it.
        return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
