"""From a kernel's operators to its work: how the sizes of a product, attention, experts or a scan are read off the
shapes, strides and arguments of each operator that computes one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from tessera_core.profile.work import (
    POINTWISE_KINDS,
    Attention,
    Experts,
    Phase,
    Product,
    Scan,
    Streaming,
    Work,
)
from tessera_core.program.ir import Kernel, Op, Program, Trace


def work_of(trace: Trace, program: Program, kernel: Kernel) -> Work:
    """What ``kernel`` of ``program`` computes.

    A kernel that holds a product, attention, experts or a scan is that, whatever pointwise operators were fused to it:
    they ride along. Of several the one with the most operations counts. A static KV cache is attended to as far as it
    is traced: ``context`` is its rows.
    """
    found = [work for op in kernel.ops if (work := _op_work(trace, program, program.ops[op], kernel.dtype))]
    if found:
        return max(found, key=_operations)
    return Streaming(
        dtype=kernel.dtype,
        read_bytes=kernel.read_bytes,
        written_bytes=kernel.written_bytes,
        flops=kernel.flops,
        pointwise=kernel.kind in POINTWISE_KINDS,
        ops=max(1, len(kernel.ops)),
        row_bytes=max((_row_bytes(trace, program.ops[op]) for op in kernel.ops), default=0),
        sorts=kernel.kind == "sort",
    )


def _row_bytes(trace: Trace, op: Op) -> int:
    """Bytes of the row in which ``op`` looks for its largest or smallest element; 0 where it doesn't look."""
    if op.target.split(".")[:2] not in (["aten", "argmax"], ["aten", "argmin"]):
        return 0
    given = [*op.arguments["args"], *op.arguments["kwargs"].values()]
    if not (given and isinstance(given[0], dict) and "tensor" in given[0]):
        return 0
    tensor, axis = trace.tensors[given[0]["tensor"]], given[1] if len(given) > 1 else None
    if isinstance(axis, int) and tensor.shape:
        return tensor.item_bytes * tensor.shape[axis]
    return tensor.item_bytes * math.prod(tensor.shape)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """An op's tensor: ``stride`` is None, and ``item_bytes`` 0, where a profile from elsewhere tells shapes alone."""

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    weight: bool
    item_bytes: int = 0

    def repeats(self, axis: int) -> bool:
        """Whether all of ``axis`` is the same memory."""
        return self.shape[axis] == 1 or (self.stride is not None and self.stride[axis] == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """An op as the readers below take it. ``given``: its arguments in order; ``named``: by keyword."""

    dtype: str
    phase: str
    given: Sequence[Any]
    named: Mapping[str, Any]
    made: _Tensor | None

    def shape(self, index: int) -> tuple[int, ...]:
        return self.tensor(index).shape

    def tensor(self, index: int) -> _Tensor:
        tensor = self.given[index]
        assert isinstance(tensor, _Tensor)
        return tensor

    def argument(self, index: int, name: str) -> Any:
        return self.given[index] if index < len(self.given) else self.named.get(name)


_Reader: TypeAlias = Callable[[_Call], Work | None]


def _op_work(trace: Trace, program: Program, op: Op, dtype: str) -> Work | None:
    namespace, _, rest = op.target.partition(".")
    ranks, read = _READERS.get((namespace, rest.partition(".")[0]), ((), None))
    if read is None:
        return None
    given = [_value(trace, argument) for argument in op.arguments["args"]]
    if len(given) < len(ranks) or not all(
        rank == 0 or (isinstance(value, _Tensor) and len(value.shape) >= rank)
        for value, rank in zip(given, ranks)
    ):
        return None  # recorded without what would tell its sizes
    return read(
        _Call(
            dtype=dtype,
            phase=program.phase,
            given=given,
            named={name: _value(trace, argument) for name, argument in op.arguments["kwargs"].items()},
            made=_value(trace, {"tensor": op.outputs[0]}) if op.outputs else None,
        )
    )


def _value(trace: Trace, argument: Any) -> Any:
    """An argument, tensors as :class:`_Tensor`; of one known by its shape alone, two axes are taken for a weight."""
    if isinstance(argument, dict) and "tensor" in argument:
        tensor = trace.tensors[argument["tensor"]]
        return _Tensor(
            tensor.shape, tensor.stride, trace.buffers[tensor.buffer].kind == "weight", tensor.item_bytes
        )
    if isinstance(argument, dict) and "shape" in argument:
        return _Tensor(tuple(argument["shape"]), None, len(argument["shape"]) == 2)
    return argument


def _product(call: _Call, left: int, right: int) -> Work | None:
    """``left`` (..., m, k) by ``right`` (..., k, n); a weight on the left makes the right one's columns the rows."""
    first, second = call.shape(left), call.shape(right)
    m, k, n = first[-2], first[-1], second[-1]
    count = math.prod(first[:-2])
    if len(second) > 2 and call.tensor(right).repeats(0):
        m, count = m * count, 1  # one weight for the whole batch: its rows are those of a single product
    weight = call.tensor(right).weight
    if call.tensor(left).weight and not weight:
        m, n, weight = n, m, True
    return _sized(call, count, m, n, k, weight)


def _sized(call: _Call, count: int, m: int, n: int, k: int, weight: bool) -> Product | None:
    """A product; None where a factor is a vector's worth and nothing is summed, which only streams."""
    if k <= 1 or (n <= 1 and count > 1):
        return None
    return Product(dtype=call.dtype, count=count, m=m, n=n, k=k, weight=weight)


def _linear(call: _Call) -> Work | None:
    rows, weight = call.shape(0), call.shape(1)
    return _sized(call, 1, math.prod(rows[:-1]), weight[0], weight[1], call.tensor(1).weight)


def _matrix_vector(call: _Call) -> Work | None:
    place = len(call.given) - 2
    matrix = call.shape(place)
    return _sized(call, 1, 1, matrix[0], matrix[1], call.tensor(place).weight)


def _grouped(call: _Call) -> Work | None:
    """Rows in groups, each by a matrix of its own, taken as evenly shared out."""
    rows, weights = call.shape(0), call.shape(1)
    m = -(-rows[-2] // weights[0])
    return _sized(call, weights[0], m, weights[-1], rows[-1], call.tensor(1).weight)


def _convolution(call: _Call, groups_at: int = 8, transposed_at: int | None = 6) -> Work | None:
    """The product that a convolution implies: output positions by output channels, over a window's inputs."""
    kernel = call.shape(1)
    groups = call.argument(groups_at, "groups") or 1
    if (
        call.made is None
        or len(call.made.shape) < 3
        or (transposed_at is not None and call.argument(transposed_at, "transposed"))
    ):
        return None
    m = call.made.shape[0] * math.prod(call.made.shape[2:])
    work = _sized(call, groups, m, kernel[0] // groups, math.prod(kernel[1:]), call.tensor(1).weight)
    return None if work is None else replace(work, convolution=True)


def _attention(call: _Call, mask_at: int | None, causal_at: int, tokens_first: bool = False) -> Work | None:
    """Attention: causal is a prompt's; one position, or heads folded into positions, is decoding.

    ``mask_at``, ``causal_at``: where the operator takes them. ``tokens_first``: (batch, tokens, heads, width).
    """
    query, key = call.shape(0), call.shape(1)
    if tokens_first:
        query, key = ((*shape[:-3], shape[-2], shape[-3], shape[-1]) for shape in (query, key))
    mask = None if mask_at is None else call.argument(mask_at, "attn_mask")
    causal = bool(call.argument(causal_at, "is_causal"))
    batch, heads, kv_heads = math.prod(query[:-3]), query[-3], key[-3]
    queries, context = query[-2], key[-2]
    phase: Phase = "prefill" if causal else "encoder"
    if isinstance(mask, _Tensor) and len(mask.shape) > 1:
        if call.phase == "decode" and mask.repeats(-2):
            # All positions see the same keys: they are the query heads that share a key head.
            phase, heads, queries = "decode", heads * queries, 1
        else:
            phase = "prefill" if queries > 1 and call.phase == "prefill" else phase
    if queries == 1 and context > 1:
        phase = "decode"
    return Attention(
        dtype=call.dtype,
        phase=phase,
        batch=batch,
        queries=queries,
        context=context,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=query[-1],
        window=None,
    )


def _sink_attention(call: _Call) -> Work | None:
    (batch, heads, queries, width), key = call.shape(0), call.shape(1)
    window = call.argument(6, "window") or 0
    return Attention(
        dtype=call.dtype,
        phase="prefill" if call.argument(4, "position") is None else "decode",
        batch=batch,
        queries=queries,
        context=key[2],
        heads=heads,
        kv_heads=key[1],
        head_dim=width,
        window=window if 0 < window < key[2] else None,
    )


def _latent_attention(call: _Call) -> Work | None:
    """Latent attention while decoding: all heads share one cached row, which is key and value."""
    (batch, heads, width), cache = call.shape(0), call.shape(1)
    return Attention(
        dtype=call.dtype,
        phase="decode",
        batch=batch,
        queries=1,
        context=cache[1],
        heads=heads,
        kv_heads=1,
        head_dim=width,
        window=None,
    )


def _experts(call: _Call, down: int, inner: int) -> Work | None:
    """``down``: the argument that holds the second factors; ``inner``: its axis of the inner width."""
    tokens, hidden = call.shape(0)
    return Experts(
        dtype=call.dtype,
        tokens=tokens,
        hidden=hidden,
        intermediate=call.shape(down)[inner],
        experts=call.shape(down)[0],
        top_k=call.shape(1)[1],
    )


def _mixer_convolution(call: _Call) -> Work | None:
    source = call.shape(0)
    return Scan(
        dtype=call.dtype,
        part="convolution",
        phase="prefill" if len(source) == 3 else "decode",
        batch=source[0],
        length=source[1] if len(source) == 3 else 1,
        channels=source[-1],
        heads=0,
        head_dim=0,
        state=0,
        groups=0,
    )


def _recurrence(call: _Call) -> Work | None:
    source, enter = call.shape(0), call.shape(3)
    heads, width = source[-2:]
    state = call.argument(7, "state")
    return Scan(
        dtype=call.dtype,
        part="recurrence",
        phase="prefill" if len(source) == 4 else "decode",
        batch=source[0],
        length=source[1] if len(source) == 4 else 1,
        channels=heads * width,
        heads=heads,
        head_dim=width,
        state=enter[-1],
        groups=enter[-2],
        state_item_bytes=(isinstance(state, _Tensor) and state.item_bytes) or 4,
    )


def _each(names: str, ranks: tuple[int, ...], read: _Reader, namespace: str = "aten") -> Iterable[Any]:
    return [((namespace, name), (ranks, read)) for name in names.split()]


_READERS: Mapping[tuple[str, str], tuple[tuple[int, ...], _Reader]] = dict(
    [
        *_each("mm bmm _scaled_mm _int_mm", (2, 2), lambda call: _product(call, 0, 1)),
        *_each("addmm baddbmm", (0, 2, 2), lambda call: _product(call, 1, 2)),
        *_each("mv", (2, 1), _matrix_vector),
        *_each("addmv", (0, 2, 1), _matrix_vector),
        *_each("_grouped_mm _scaled_grouped_mm", (2, 3), _grouped),
        *_each("linear", (1, 2), _linear),
        *_each("convolution _convolution", (3, 3), _convolution),
        *_each("cudnn_convolution", (3, 3), lambda call: _convolution(call, 5, None)),
        # The tracer records the portable operator; profiles from elsewhere hold the variant that ran.
        *_each(
            "scaled_dot_product_attention _scaled_dot_product_attention_math"
            " _scaled_dot_product_fused_attention_overrideable",
            (3, 3),
            lambda call: _attention(call, 3, 5),
        ),
        *_each("_scaled_dot_product_flash_attention", (3, 3), lambda call: _attention(call, None, 4)),
        *_each(
            "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
            (3, 3),
            lambda call: _attention(call, 3, 6),
        ),
        *_each("_cudnn_attention_forward", (3, 3), lambda call: _attention(call, 3, 10)),
        *_each("_flash_attention_forward", (4, 4), lambda call: _attention(call, None, 8, True)),
        *_each("_efficient_attention_forward", (4, 4), lambda call: _attention(call, 3, 9, True)),
        *_each("sink_attention", (4, 4), _sink_attention, "tessera"),
        *_each("latent_attention", (3, 3), _latent_attention, "tessera"),
        *_each(
            "clamped_experts clamped_experts_part",
            (2, 2, 0, 0, 0, 3),
            lambda call: _experts(call, 5, 1),
            "tessera",
        ),
        *_each("gated_experts", (2, 2, 0, 0, 3), lambda call: _experts(call, 4, 2), "tessera"),
        *_each("causal_convolution causal_convolution_step", (2,), _mixer_convolution, "tessera"),
        *_each("selective_scan selective_step", (3, 0, 0, 3), _recurrence, "tessera"),
    ]
)
"""Operators that are more than streaming, by namespace and name: of each argument in order the fewest axes that it
must be known to have (0: not looked at), and what reads the operator."""


def _operations(work: Work) -> int:
    """Multiply-adds, roughly: which of several works dominates a kernel."""
    match work:
        case Product():
            return work.count * work.m * work.n * work.k
        case Attention():
            return 2 * work.batch * work.heads * work.queries * work.context * work.head_dim
        case Experts():
            return 3 * work.tokens * work.top_k * work.hidden * work.intermediate
        case Scan():
            return work.batch * work.length * work.channels * max(work.state, 1)
        case Streaming():
            return work.flops
