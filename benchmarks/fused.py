"""The fused operators' CUDA kernels at real widths: time, rates, and PyTorch's own kernels where those are near.

Calls go round over as many sets of arguments as exceed the L2 cache, all in one CUDA graph. The roofline's share takes
the catalogue's measured rates for the H200, and operations and bytes as ``tessera_core/trace/fused/table.py``
counts them.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import Bar, report
from benchmarks.cuda_time import graph_of, replays_us
from tessera_core.profile.catalogue import device_type
from tessera_core.trace.capture.stage import machine_facts
from tessera_core.trace.fused import operators
from tessera_core.trace.fused.table import FUSED

DEVICE = "cuda:0"
COLD_BYTES = 150e6
"""Three times the L2 cache of the H200."""
CALLS, ROUNDS = 32, 15

Arguments = tuple[Any, ...]
Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call. ``near`` prepares PyTorch's nearest own work on its arguments; ``lacks``: what that leaves out."""

    name: str
    operator: str
    make: Callable[[], Arguments]
    near: Callable[..., Call] | None = None
    lacks: str = ""


def main() -> int:
    """Time every case."""
    if not torch.cuda.is_available():
        print("fused needs a CUDA device", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    facts = machine_facts(DEVICE, False)
    results = {}
    bars = []
    for case in CASES:
        found = results[case.name] = measure(case)
        torch.cuda.empty_cache()
        if case.near is not None:
            ratio = round(found["us"] / found["pytorch_us"], 3)
            name = f"{case.name}: time over PyTorch's ({case.lacks})"
            bars.append(Bar(name, ratio, "<= 2", ratio <= 2))
    return report("fused", results, bars, f"{facts['device']}, driver {facts['driver']}")


def measure(case: Case) -> dict[str, Any]:
    """Microseconds of one call, rates, and the share of the roofline."""
    one = case.make()
    size = traffic(case.operator, one)
    sets = [one, *(case.make() for _ in range(min(CALLS, math.ceil(COLD_BYTES / size)) - 1))]
    operator = getattr(operators, case.operator)
    spent = timed([partial(operator, *given) for given in sets])
    flops = FUSED[case.operator].flops(shapes(one))
    rates = device_type("h200-sxm").measured
    assert rates is not None
    least = max(size / rates.memory_bytes_per_s, flops / rates.flops_per_s["bfloat16"]) * 1e6
    found = {
        "us": round(spent, 2),
        "gbyte_per_s": round(size / spent * 1e-3, 1),
        "tflop_per_s": round(flops / spent * 1e-6, 2),
        "roofline_share": round(least / spent, 3),
    }
    if case.near is not None:
        found["pytorch_us"] = round(timed([case.near(*given) for given in sets]), 2)
    return found


def shapes(arguments: Sequence[Any]) -> list[Any]:
    """Each tensor as its shape."""
    return [tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in arguments]


def traffic(operator: str, arguments: Arguments) -> int:
    """Bytes that a call reads and writes at least; the result is as large as the first argument."""
    known, total = FUSED[operator], 0
    for index, value in enumerate(arguments):
        if isinstance(value, torch.Tensor):
            limit = known.reads(shapes(arguments), index)
            state = known.fills and value is arguments[3 if "convolution" in operator else 7]
            times = 2 - known.overwrites if state else 1
            total += (value.numel() if limit is None else limit) * value.element_size() * times
    return total + int(arguments[0].numel() * arguments[0].element_size())


def timed(calls: Sequence[Call]) -> float:
    """Median microseconds of a call, by the device's clock; the calls take turns."""

    def run() -> None:
        for number in range(CALLS):
            calls[number % len(calls)]()

    return statistics.median(replays_us(graph_of(run), ROUNDS)) / CALLS


def draw(*shape: int) -> torch.Tensor:
    """Normal numbers: never time on zeros."""
    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)


def _sinks(batch: int, tokens: int, rows: int, window: int) -> Arguments:
    """gpt-oss-20b's attention."""
    query = draw(batch, tokens, 64, 64).transpose(1, 2)
    position = None if tokens > 1 else torch.tensor([rows - 1], device=DEVICE)
    return query, draw(batch, 8, rows, 64), draw(batch, 8, rows, 64), draw(64), position, 0.125, window


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> Call:
    return lambda: scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def _cached(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> Call:
    batch, heads, _, width = query.shape
    rows = query.reshape(batch, key.shape[1], heads // key.shape[1], width)
    return lambda: scaled_dot_product_attention(rows, key, value)


def _latent() -> Arguments:
    """DeepSeek-V3's attention."""
    position = torch.tensor([1023], device=DEVICE)
    return draw(16, 128, 576), draw(16, 1024, 576), position, 0.1, 512


def _chosen(tokens: int, experts: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = torch.rand(tokens, experts, device=DEVICE).topk(slots, dim=1).indices
    return chosen, torch.rand(tokens, slots, device=DEVICE).softmax(-1).to(torch.bfloat16)


def _clamped(tokens: int) -> Arguments:
    """gpt-oss-20b's experts."""
    weights = (draw(32, 2880, 5760), draw(32, 5760), draw(32, 2880, 2880), draw(32, 2880))
    return draw(tokens, 2880), *_chosen(tokens, 32, 4), *weights, 1.702, 7.0


def _gated(tokens: int) -> Arguments:
    """Qwen3-235B's experts."""
    return draw(tokens, 4096), *_chosen(tokens, 128, 8), draw(128, 3072, 4096), draw(128, 4096, 1536)


def _clamped_products(
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor,
    down: torch.Tensor,
    *rest: Any,
) -> Call:
    return _products(hidden, chosen, gate_up, down)


def _gated_products(
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> Call:
    return _products(hidden, chosen, gate_up.transpose(1, 2), down.transpose(1, 2))


def _products(hidden: torch.Tensor, chosen: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> Call:
    """Both grouped products, on rows that are sorted by expert and activated already."""
    counts = torch.bincount(chosen.flatten(), minlength=down.shape[0])
    ends = counts.cumsum(0).to(torch.int32)
    rows, gated = draw(chosen.numel(), hidden.shape[1]), draw(chosen.numel(), down.shape[1])
    grouped_mm = torch.nn.functional.grouped_mm
    return lambda: (grouped_mm(rows, gate_up, offs=ends), grouped_mm(gated, down, offs=ends))


def _convolution(batch: int, tokens: int) -> Arguments:
    """Mamba-Codestral's convolution."""
    source = draw(batch, tokens, 10240) if tokens > 1 else draw(batch, 10240)
    return source, draw(10240, 4), draw(10240), draw(batch, 10240, 3)


def _recurrence(batch: int, tokens: int) -> Arguments:
    """Mamba-Codestral's recurrence."""
    outer = (batch, tokens) if tokens > 1 else (batch,)
    given = (draw(*outer, 128, 64), draw(*outer, 128), draw(128).abs(), draw(*outer, 8, 128))
    rest = (draw(*outer, 8, 128), draw(128), draw(128) - 3, draw(batch, 128, 64, 128))
    return (*given, *rest, 256) if tokens > 1 else (*given, *rest)


CASES = (
    Case(
        name="sink_attention, a prompt of 1024",
        operator="sink_attention",
        make=lambda: _sinks(1, 1024, 1024, 0),
        near=_causal,
        lacks="without sinks",
    ),
    Case(
        name="sink_attention, a prompt of 1024, window 128",
        operator="sink_attention",
        make=lambda: _sinks(1, 1024, 1024, 128),
        near=_causal,
        lacks="without sinks and window",
    ),
    Case(
        name="sink_attention, 64 tokens over 1024 rows",
        operator="sink_attention",
        make=lambda: _sinks(64, 1, 1024, 0),
        near=_cached,
        lacks="without sinks",
    ),
    Case(
        name="sink_attention, 64 tokens over 1024 rows, window 128",
        operator="sink_attention",
        make=lambda: _sinks(64, 1, 1024, 128),
        near=_cached,
        lacks="without sinks and window",
    ),
    Case(name="latent_attention, 16 tokens over 1024 rows", operator="latent_attention", make=_latent),
    *(
        Case(
            name=f"{operator}, {tokens} tokens",
            operator=operator,
            make=lambda make=make, tokens=tokens: make(tokens),  # type: ignore[misc]
            near=near,
            lacks="both products alone",
        )
        for operator, make, near in (
            ("clamped_experts", _clamped, _clamped_products),
            ("gated_experts", _gated, _gated_products),
        )
        for tokens in (64, 1024)
    ),
    Case(
        name="causal_convolution, a prompt of 1024",
        operator="causal_convolution",
        make=lambda: _convolution(1, 1024),
    ),
    Case(
        name="causal_convolution_step, 64 tokens",
        operator="causal_convolution_step",
        make=lambda: _convolution(64, 1),
    ),
    Case(
        name="selective_scan, a prompt of 1024", operator="selective_scan", make=lambda: _recurrence(1, 1024)
    ),
    Case(name="selective_step, 64 tokens", operator="selective_step", make=lambda: _recurrence(64, 1)),
)


if __name__ == "__main__":
    sys.exit(main())
