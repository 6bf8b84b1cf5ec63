"""Triton kernels for the tests of launch interception; imported by path, as a user's module is."""

from typing import Any

import torch
import triton
import triton.language as tl

from tessera_core.trace.declare import triton_cpu


@triton.jit  # type: ignore[untyped-decorator]
def scale(x, out, count, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    tl.store(out + place, tl.load(x + place, mask=inside) * factor, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def plain(x, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    tl.store(out + place, tl.load(x + place, mask=inside) + 1.0, mask=inside)


@triton.jit
def careless(x, out, count):  # type: ignore[no-untyped-def]
    tl.store(out, tl.load(x) + count)


@triton.jit  # type: ignore[untyped-decorator]
def broken(x, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(out + tl.arange(0, BLOCK), tl.load(x + tl.arange(0, BLOCK + 1)))


def _broken(x: torch.Tensor, out: torch.Tensor, BLOCK: int) -> None:
    out.copy_(x[0])


def _scale(x: torch.Tensor, out: torch.Tensor, count: int, factor: float, BLOCK: int) -> None:
    out.view(-1)[:count] = x.reshape(-1)[:count] * factor


def _careless(x: torch.Tensor, out: torch.Tensor, count: int) -> None:
    out.add_(1)
    x.add_(1)


triton_cpu(scale, _scale, reads=("x",), writes=("out",), must=("out",))
triton_cpu(broken, _broken, reads=("x",), writes=("out",), must=("out",))
triton_cpu(careless, _careless, reads=("x",), writes=("out",))


@triton.autotune(configs=[triton.Config({"BLOCK": 16}, num_warps=2), triton.Config({"BLOCK": 32})], key=[])  # type: ignore[untyped-decorator]
@triton.jit  # type: ignore[untyped-decorator]
def tuned(x, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    tl.store(out + place, tl.load(x + place, mask=inside) * 2.0, mask=inside)


def _tuned(x: torch.Tensor, out: torch.Tensor, count: int, BLOCK: int) -> None:
    out.view(-1)[:count] = x.reshape(-1)[:count] * 2.0


triton_cpu(tuned.fn, _tuned, reads=("x",), writes=("out",), must=("out",))


def _clear(arguments: dict[str, Any]) -> None:
    arguments["out"].zero_()


@triton.autotune(configs=[triton.Config({"BLOCK": 32}, pre_hook=_clear)], key=[])  # type: ignore[untyped-decorator]
@triton.jit  # type: ignore[untyped-decorator]
def added(x, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out + place, tl.load(x + place, mask=place < count), mask=place < count)


def _added(x: torch.Tensor, out: torch.Tensor, count: int, BLOCK: int) -> None:
    out.view(-1)[:count] += x.reshape(-1)[:count]


triton_cpu(added.fn, _added, reads=("x", "out"), writes=("out",))


@torch.library.custom_op("tessera_tests::forked", mutates_args=())
def forked(x: torch.Tensor) -> torch.Tensor:
    """A launch on a stream that the op makes for itself."""
    main, side, out = torch.cuda.current_stream(), torch.cuda.Stream(), torch.empty_like(x)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        scale[(1,)](x, out, x.numel(), 2.0, BLOCK=64)
    main.wait_stream(side)
    return out


@torch.library.custom_op("tessera_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    """A custom op whose implementation launches a kernel."""
    out = torch.empty_like(x)
    scale[(1,)](x, out, x.numel(), 2.0, BLOCK=64)
    return out


@torch.library.custom_op("tessera_tests::quadrupled", mutates_args=())
def quadrupled(x: torch.Tensor) -> torch.Tensor:
    """Two launches, the first into a temporary."""
    half, out = torch.empty_like(x), torch.empty_like(x)
    scale[(1,)](x, half, x.numel(), 2.0, BLOCK=64)
    scale[(1,)](half.view(-1), out, x.numel(), 2.0, BLOCK=64)
    return out


@torch.library.custom_op("tessera_tests::prepared", mutates_args=())
def prepared(x: torch.Tensor) -> torch.Tensor:
    """A launch on what another operator has made of the argument."""
    out = torch.empty_like(x)
    scale[(1,)](x * 2, out, x.numel(), 2.0, BLOCK=64)
    return out


TABLE = torch.ones(64)


@torch.library.custom_op("tessera_tests::outsider", mutates_args=())
def outsider(x: torch.Tensor) -> torch.Tensor:
    """A launch on a tensor that the op does not say it reads."""
    out = torch.empty_like(x)
    scale[(1,)](TABLE, out, x.numel(), 2.0, BLOCK=64)
    return out
