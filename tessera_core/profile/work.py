"""What a kernel computes, in the terms in which GPU times are published and predicted: a matrix product by its
sizes, attention by heads and lengths, experts by widths, a selective scan by its state; all else by its bytes.

Silicon tables are looked up by these, and models predict from these, so both see a kernel alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tessera_core.program.ir import Kernel, Op, Program, TensorRef, Trace

Phase = Literal["prefill", "decode", "encoder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """``count`` independent products of (m, k) by (k, n); ``m``: rows that the batch brings, ``n, k``: the weight.

    ``weight``: the right factor is a weight (read once, whatever the batch), not an activation.
    """

    dtype: str
    count: int
    m: int
    n: int
    k: int
    weight: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Attention of ``queries`` new positions to ``context`` keys, both per sequence, in ``batch`` sequences.

    ``phase`` decode: one new position each. encoder: not causal. ``window``: keys that a query sees; None: all.
    """

    dtype: str
    phase: Phase
    batch: int
    queries: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A routed feed-forward layer: ``tokens`` each pass ``top_k`` of ``experts`` of width ``intermediate``."""

    dtype: str
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """A Mamba-2 mixer's part: the causal convolution or the state-space recurrence.

    ``channels``: of the convolution, or heads times head_dim. A convolution has no heads, groups or state: 0.
    """

    dtype: str
    part: Literal["convolution", "recurrence"]
    phase: Literal["prefill", "decode"]
    batch: int
    length: int
    channels: int
    heads: int
    head_dim: int
    state: int
    groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """Anything else: bounded by the bytes that it reads and writes, or by its launch.

    ``pointwise``: without a reduction. ``ops``: how many operators were fused.
    """

    dtype: str
    read_bytes: int
    written_bytes: int
    flops: int
    pointwise: bool
    ops: int


Work = Product | Attention | Experts | Scan | Streaming

POINTWISE_KINDS = frozenset({"pointwise", "copy", "counter", "embedding"})
"""Kinds of kernels without a reduction."""


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
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """An op as the readers below take it. ``given``: its arguments, tensors as they are; ``named``: by keyword."""

    dtype: str
    phase: str
    given: Sequence[Any]
    named: Mapping[str, Any]
    made: TensorRef | None
    weights: frozenset[int]

    def shape(self, index: int) -> tuple[int, ...]:
        tensor = self.given[index]
        assert isinstance(tensor, TensorRef)
        return tensor.shape

    def is_weight(self, index: int) -> bool:
        return bool(self.given[index].buffer in self.weights)

    def argument(self, index: int, name: str) -> Any:
        return self.given[index] if index < len(self.given) else self.named.get(name)


_BY_SHAPE = frozenset({"mm", "bmm", "addmm", "baddbmm", "linear"})
"""Operators whose work follows from shapes alone: all that a profile without storages tells of its calls."""


def _is_described(argument: Any) -> bool:
    """Whether it is a tensor of which dtype and shape were recorded, and no storage."""
    return isinstance(argument, dict) and "shape" in argument and "tensor" not in argument


def _op_work(trace: Trace, program: Program, op: Op, dtype: str) -> Work | None:
    namespace, _, rest = op.target.partition(".")
    name = rest.partition(".")[0]
    read = _READERS.get((namespace, name))
    if read is None:
        return None
    if any(_is_described(argument) for argument in op.arguments["args"]) and name not in _BY_SHAPE:
        return None

    def value(argument: Any) -> Any:
        if _is_described(argument):
            shape = tuple(argument["shape"])
            return TensorRef(id=-1, buffer=-1, dtype=argument["dtype"], shape=shape, stride=(), offset=0)
        if isinstance(argument, dict) and "tensor" in argument:
            return trace.tensors[argument["tensor"]]
        return argument

    given = [value(argument) for argument in op.arguments["args"]]
    tensors = [argument for argument in given if isinstance(argument, TensorRef)]
    return read(
        _Call(
            dtype=dtype,
            phase=program.phase,
            given=given,
            named={name: value(argument) for name, argument in op.arguments["kwargs"].items()},
            made=trace.tensors[op.outputs[0]] if op.outputs else None,
            weights=frozenset(t.buffer for t in tensors if trace.buffers[t.buffer].kind == "weight"),
        )
    )


def _product(call: _Call, left: int, right: int) -> Work | None:
    """``left`` (..., m, k) by ``right`` (..., k, n); a weight on the left makes the right one's columns the rows."""
    first, second = call.shape(left), call.shape(right)
    m, k, n = first[-2], first[-1], second[-1]
    count = math.prod(first[:-2])
    if len(second) > 2 and call.given[right].stride[0] == 0:
        m, count = m * count, 1  # one weight for the whole batch: its rows are those of a single product
    weight = call.is_weight(right)
    if call.is_weight(left) and not weight:
        m, n, weight = n, m, True
    return _sized(call, count, m, n, k, weight)


def _sized(call: _Call, count: int, m: int, n: int, k: int, weight: bool) -> Work | None:
    """A product; None where a factor is a vector's worth and nothing is summed, which only streams."""
    if k <= 1 or (n <= 1 and count > 1):
        return None
    return Product(dtype=call.dtype, count=count, m=m, n=n, k=k, weight=weight)


def _linear(call: _Call) -> Work | None:
    rows, weight = call.shape(0), call.shape(1)
    return _sized(call, 1, math.prod(rows[:-1]), weight[0], weight[1], call.is_weight(1))


def _matrix_vector(call: _Call) -> Work | None:
    place = len(call.given) - 2
    matrix = call.shape(place)
    return _sized(call, 1, 1, matrix[0], matrix[1], call.is_weight(place))


def _grouped(call: _Call) -> Work | None:
    """Rows in groups, each by a matrix of its own, taken as evenly shared out."""
    rows, weights = call.shape(0), call.shape(1)
    if len(weights) != 3:
        return None
    m = -(-rows[-2] // weights[0])
    return _sized(call, weights[0], m, weights[-1], rows[-1], call.is_weight(1))


def _convolution(call: _Call, groups_at: int = 8, transposed_at: int | None = 6) -> Work | None:
    """The product that a convolution implies: output positions by output channels, over a window's inputs."""
    kernel = call.shape(1)
    groups = call.argument(groups_at, "groups") or 1
    if call.made is None or (transposed_at is not None and call.argument(transposed_at, "transposed")):
        return None
    m = call.made.shape[0] * math.prod(call.made.shape[2:])
    return _sized(call, groups, m, kernel[0] // groups, math.prod(kernel[1:]), call.is_weight(1))


def _attention(call: _Call, mask_at: int | None, causal_at: int, tokens_first: bool = False) -> Work | None:
    """Attention: causal is a prompt's; one position, or heads folded into positions, is decoding.

    ``mask_at``, ``causal_at``: where the operator takes them. ``tokens_first``: (batch, tokens, heads, width).
    """
    query, key = call.shape(0), call.shape(1)
    if len(query) < 3:
        return None
    if tokens_first:
        query, key = ((*shape[:-3], shape[-2], shape[-3], shape[-1]) for shape in (query, key))
    mask = None if mask_at is None else call.argument(mask_at, "attn_mask")
    causal = bool(call.argument(causal_at, "is_causal"))
    batch, heads, kv_heads = math.prod(query[:-3]), query[-3], key[-3]
    queries, context = query[-2], key[-2]
    phase: Phase = "prefill" if causal else "encoder"
    if isinstance(mask, TensorRef):
        if call.phase == "decode" and (mask.shape[-2] == 1 or mask.stride[-2] == 0):
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
    )


_READERS: Mapping[tuple[str, str], Callable[[_Call], Work | None]] = {
    **{("aten", name): lambda call: _product(call, 0, 1) for name in ("mm", "bmm", "_scaled_mm", "_int_mm")},
    **{("aten", name): lambda call: _product(call, 1, 2) for name in ("addmm", "baddbmm")},
    **{("aten", name): _matrix_vector for name in ("mv", "addmv")},
    **{("aten", name): _grouped for name in ("_grouped_mm", "_scaled_grouped_mm")},
    ("aten", "linear"): _linear,
    **{("aten", name): _convolution for name in ("convolution", "_convolution")},
    ("aten", "cudnn_convolution"): lambda call: _convolution(call, 5, None),
    # The tracer records the portable operator; profiles from elsewhere hold the variant that ran.
    ("aten", "scaled_dot_product_attention"): lambda call: _attention(call, 3, 5),
    ("aten", "_scaled_dot_product_attention_math"): lambda call: _attention(call, 3, 5),
    ("aten", "_scaled_dot_product_fused_attention_overrideable"): lambda call: _attention(call, 3, 5),
    ("aten", "_scaled_dot_product_flash_attention"): lambda call: _attention(call, None, 4),
    ("aten", "_scaled_dot_product_efficient_attention"): lambda call: _attention(call, 3, 6),
    ("aten", "_scaled_dot_product_cudnn_attention"): lambda call: _attention(call, 3, 6),
    ("aten", "_cudnn_attention_forward"): lambda call: _attention(call, 3, 10),
    ("aten", "_flash_attention_forward"): lambda call: _attention(call, None, 8, True),
    ("aten", "_efficient_attention_forward"): lambda call: _attention(call, 3, 9, True),
    ("tessera", "sink_attention"): _sink_attention,
    ("tessera", "latent_attention"): _latent_attention,
    ("tessera", "clamped_experts"): lambda call: _experts(call, 5, 1),
    ("tessera", "clamped_experts_part"): lambda call: _experts(call, 5, 1),
    ("tessera", "gated_experts"): lambda call: _experts(call, 4, 2),
    ("tessera", "causal_convolution"): _mixer_convolution,
    ("tessera", "causal_convolution_step"): _mixer_convolution,
    ("tessera", "selective_scan"): _recurrence,
    ("tessera", "selective_step"): _recurrence,
}
"""How each operator that is more than streaming is read, by namespace and name."""


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
