"""Declarations for hand-written Triton kernels: how one runs on a CPU, and what it reads and writes.

A declaration lies on the kernel object itself, so that it lives and dies with the module that makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_ATTRIBUTE = "__tessera_declaration__"


@dataclass(frozen=True, slots=True)
class TritonDeclaration:
    """What a kernel's author states. ``implementation`` takes the kernel's parameters by name."""

    implementation: Callable[..., None]
    reads: frozenset[str]
    writes: frozenset[str]
    must: frozenset[str]


def undecorated(kernel: Any) -> Any:
    """The ``@triton.jit`` function that ``@triton.autotune`` and ``@triton.heuristics`` stand in front of."""
    while hasattr(getattr(kernel, "fn", None), "arg_names"):
        kernel = kernel.fn
    return kernel


def triton_cpu(
    kernel: Any,
    implementation: Callable[..., None],
    *,
    reads: tuple[str, ...] = (),
    writes: tuple[str, ...] = (),
    must: tuple[str, ...] = (),
) -> None:
    """Declare how ``kernel`` (a ``@triton.jit`` function, or a decorated one) runs where there is no GPU.

    ``implementation(**arguments)`` gets every parameter by its name (tensors, numbers, constexprs; not the
    grid), must write the same tensors as the kernel, and returns nothing. ``reads`` and ``writes`` name the
    tensor parameters that the kernel reads and writes; ``must`` names those of ``writes`` of which every
    element is written. Raises ``ValueError`` for a name that is no parameter of the kernel.
    """
    kernel = undecorated(kernel)
    known = set(kernel.arg_names)
    for name in (*reads, *writes, *must):
        if name not in known:
            raise ValueError(f"{name!r} is no parameter of {kernel.fn.__qualname__}")
    if not set(must) <= set(writes):
        raise ValueError(f"must names {sorted(set(must) - set(writes))}, which writes lacks")
    declaration = TritonDeclaration(implementation, frozenset(reads), frozenset(writes), frozenset(must))
    setattr(kernel, _ATTRIBUTE, declaration)


def declaration_of(kernel: Any) -> TritonDeclaration | None:
    """The declaration of a kernel, or None."""
    found: TritonDeclaration | None = getattr(undecorated(kernel), _ATTRIBUTE, None)
    return found
