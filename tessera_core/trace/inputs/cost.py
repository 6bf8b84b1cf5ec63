"""What a recorded operator call computes, from the shapes of its arguments: its kind and floating-point operations.

On a GPU attention and convolutions are recorded as the variant that ran, with layouts of their own; everything else
goes by the operator's name as in any trace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tessera_core.trace.operators import op_kind

Shape = tuple[int, ...]

_HEADS_FIRST = frozenset(
    {"scaled_dot_product_attention", "_scaled_dot_product_attention_math", "_cudnn_attention_forward"}
    | {"_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"}
    | {"_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable"}
)
_TOKENS_FIRST = frozenset({"_flash_attention_forward", "_efficient_attention_forward"})
_CONVOLUTIONS = frozenset(
    {"convolution", "_convolution", "conv1d", "conv2d", "conv3d", "cudnn_convolution"}
    | {"cudnn_convolution_relu", "cudnn_convolution_add_relu", "_conv_depthwise2d"}
)
_BIAS_FIRST = frozenset({"addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation"})
_PLAIN_PRODUCTS = frozenset({"_addmm_activation", "linear"})


def recorded_kind(target: str) -> str:
    """The kernel kind of ``NAMESPACE.NAME.OVERLOAD``."""
    name = target.split(".")[1]
    if name in _HEADS_FIRST | _TOKENS_FIRST:
        return "attention"
    if name in _CONVOLUTIONS:
        return "convolution"
    return "matmul" if name in _PLAIN_PRODUCTS else op_kind(target)


def recorded_flops(target: str, shapes: Sequence[Shape], made: Shape | None, floating: bool) -> int:
    """Floating-point operations; a multiply-add counts as two. ``made``: the result's shape, where that is known.

    A causal mask is not looked for, so that attention over a prompt counts in full.
    """
    name, kind = target.split(".")[1], recorded_kind(target)
    if kind == "matmul":
        factors = list(shapes[1:] if name in _BIAS_FIRST else shapes)[:2]
        if len(factors) == 2 and factors[0]:
            return 2 * math.prod(product_shape(name, factors[0], factors[1])) * factors[0][-1]
    if kind == "attention" and len(shapes) >= 3 and len(shapes[0]) >= 3:
        query, key, value = shapes[:3]
        keys = key[-3] if name in _TOKENS_FIRST else key[-2]
        return 2 * math.prod(query[:-1]) * keys * (query[-1] + value[-1])
    if kind == "convolution" and len(shapes) >= 2:
        source, weight = shapes[:2]
        outputs = math.prod(made) if made else source[0] * weight[0] * math.prod(source[2:])
        return 2 * outputs * math.prod(weight[1:])
    if kind in ("copy", "embedding") or not floating:
        return 0
    return max((math.prod(shape) for shape in (*shapes, made or ())), default=0)


def result_shape(target: str, shapes: Sequence[Shape]) -> Shape:
    """What a call makes, where the profile shows its arguments only: exact for products and lookups, else the
    broadcast of all, and the largest where they do not broadcast.
    """
    name, kind = target.split(".")[1], recorded_kind(target)
    if not shapes:
        return ()
    if kind == "matmul":
        factors = list(shapes[1:] if name in _BIAS_FIRST else shapes)[:2]
        if len(factors) == 2 and factors[0]:
            return product_shape(name, factors[0], factors[1])
    if kind == "attention":
        return shapes[0]
    if kind == "embedding" and len(shapes) >= 2:
        return (*shapes[1], *shapes[0][1:])
    if name.endswith("_"):
        return shapes[0]
    result: list[int] = []
    for axis in range(max(len(shape) for shape in shapes)):
        extents = {shape[-1 - axis] for shape in shapes if len(shape) > axis} - {1}
        if len(extents) > 1:
            return max(shapes, key=math.prod)
        result.insert(0, extents.pop() if extents else 1)
    return tuple(result)


def product_shape(name: str, first: Shape, second: Shape) -> Shape:
    """The shape of a matrix product; ``linear`` multiplies by the transpose."""
    if len(second) < 2:
        return first[:-1]
    return (*first[:-1], second[-2] if name == "linear" else second[-1])
