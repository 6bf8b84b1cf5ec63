import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tessera_core.profile.operators import work_of
from tessera_core.profile.work import Attention, Experts, Product, Scan, Streaming, Work
from tessera_core.program.ir import Kernel, Op, Program, TensorRef, Trace
from tessera_core.program.store import trace_from_bundle
from tessera_formats.trace import read_trace
from tests.profile.traces import ROWS, WIDTH, tiny_trace

CAPTURES = sorted((Path(__file__).parents[2] / "fixtures" / "captures").glob("*.trace"))


def works(path: Path) -> list[tuple[Program, Kernel, Work]]:
    trace = trace_from_bundle(read_trace(path))
    return [
        (program, kernel, work_of(trace, program, kernel))
        for program in trace.programs
        for kernel in program.kernels
    ]


def flops(work: Work) -> int | None:
    """Operations by the sizes alone, as the tracer counts them; None where the sizes do not say."""
    match work:
        case Product():
            return 2 * work.count * work.m * work.n * work.k
        case Attention(phase="prefill", window=None):
            full = 4 * work.batch * work.heads * work.queries * work.context * work.head_dim
            return full // 2
        case Attention(window=None):
            return 4 * work.batch * work.heads * work.queries * work.context * work.head_dim
        case Experts():
            return 6 * work.tokens * work.top_k * work.hidden * work.intermediate
    return None


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
def test_sizes_account_for_the_operations_that_the_trace_counted(path: Path) -> None:
    checked = 0
    for _, kernel, work in works(path):
        stated = flops(work)
        if stated is None or "latent" in kernel.name:  # its values are narrower than its keys
            continue
        assert stated == pytest.approx(kernel.flops, rel=0.002 if "sink" in kernel.name else 1e-9), (
            kernel.name
        )
        checked += 1
    assert checked >= 4


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
def test_heavy_kernels_are_never_taken_for_streaming(path: Path) -> None:
    for _, kernel, work in works(path):
        assert work.dtype == kernel.dtype
        if kernel.kind in ("attention", "convolution", "matmul"):
            assert not isinstance(work, Streaming) or "rotary" in kernel.name
        if isinstance(work, Streaming):
            assert (work.read_bytes, work.written_bytes) == (kernel.read_bytes, kernel.written_bytes)


def named(path: str, phase: str, words: str) -> list[Work]:
    found = works(next(capture for capture in CAPTURES if capture.stem == path))
    return list(
        dict.fromkeys(
            work for program, kernel, work in found if program.phase == phase and words in kernel.name
        )
    )


def test_decoding_folds_query_heads_back_out_of_positions() -> None:
    (work,) = named("llama-3-8b-4-layers", "decode", "scaled_dot_product_attention")
    assert work == Attention(
        dtype="bfloat16", phase="decode", batch=64, queries=1, context=1024, heads=32, kv_heads=8, head_dim=128,
        window=None,
    )  # fmt: skip


def test_fused_operators_are_read_by_their_own_arguments() -> None:
    windows = {
        work.window
        for work in named("gpt-oss-20b-2-layers", "decode", "sink_attention")
        if isinstance(work, Attention)
    }
    assert windows == {128, None}
    (experts,) = named("gpt-oss-20b-2-layers", "decode", "clamped_experts")
    assert experts == Experts(
        dtype="bfloat16", tokens=64, hidden=2880, intermediate=2880, experts=32, top_k=4
    )
    (latent,) = named("deepseek-tiny", "decode", "latent_attention")
    assert isinstance(latent, Attention)
    assert (latent.heads, latent.kv_heads, latent.head_dim, latent.context) == (4, 1, 40, 64)
    (scan,) = named("mamba-codestral-7b-1-layer", "prefill", "selective_scan")
    assert scan == Scan(
        dtype="bfloat16", part="recurrence", phase="prefill", batch=1, length=1024, channels=8192, heads=128,
        head_dim=64, state=128, groups=8, state_item_bytes=2,
    )  # fmt: skip
    (step,) = named("mamba-codestral-7b-1-layer", "decode", "causal_convolution_step")
    assert isinstance(step, Scan) and (step.phase, step.batch, step.channels) == ("decode", 64, 10240)


def test_an_image_is_attended_to_from_both_sides() -> None:
    found = named("stable-diffusion-3.5-medium-2-layers", "step", "scaled_dot_product_attention")
    assert {work.phase for work in found if isinstance(work, Attention)} == {"encoder"}
    (patches,) = named("qwen2.5-vl-7b-1-layer", "prefill", "convolution")
    assert patches == Product(
        dtype="bfloat16", count=1, m=1024, n=1280, k=1176, weight=True, convolution=True
    )


def test_a_weight_shared_by_the_whole_batch_is_one_product() -> None:
    (work,) = named("stable-diffusion-3.5-medium-2-layers", "step", "attn.to_add_out")
    assert work == Product(dtype="bfloat16", count=1, m=666, n=1536, k=1536, weight=True)


def product(
    target: str, shapes: list[tuple[int, ...]], weight: int | None = 1, more: Sequence[Any] = ()
) -> Work:
    """The hand-made trace's product as another operator on ``shapes``, one of them a weight's, then ``more``."""
    trace: Trace = tiny_trace()
    program = trace.programs[0]
    first, second = (buffer.id for buffer in trace.buffers if buffer.name in ("x", "w"))
    tensors = list(trace.tensors)
    given: list[Any] = []
    for index, shape in enumerate(shapes):
        stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        buffer = second if index == weight else first
        tensors.append(
            TensorRef(id=len(tensors), buffer=buffer, dtype="float32", shape=shape, stride=stride, offset=0)
        )
        given.append({"tensor": len(tensors) - 1})
    op: Op = replace(program.ops[0], target=target, arguments={"args": [*given, *more], "kwargs": {}})
    program = replace(program, ops=(op, *program.ops[1:]))
    return work_of(replace(trace, tensors=tuple(tensors), programs=(program,)), program, program.kernels[0])


@pytest.mark.parametrize(
    ("target", "shapes", "weight", "sizes"),
    [
        ("aten.mm.default", [(8, 32), (32, 16)], 1, (1, 8, 16, 32, True)),
        ("aten.mm.default", [(8, 32), (32, 16)], 0, (1, 16, 8, 32, True)),
        ("aten.mm.default", [(8, 32), (32, 16)], None, (1, 8, 16, 32, False)),
        ("aten.addmm.default", [(16,), (8, 32), (32, 16)], 2, (1, 8, 16, 32, True)),
        ("aten.baddbmm.default", [(4, 8, 16), (4, 8, 32), (4, 32, 16)], None, (4, 8, 16, 32, False)),
        ("aten.linear.default", [(2, 4, 32), (16, 32)], 1, (1, 8, 16, 32, True)),
        ("aten.mv.default", [(16, 32), (32,)], 0, (1, 1, 16, 32, True)),
        ("aten.addmv.default", [(16,), (16, 32), (32,)], 1, (1, 1, 16, 32, True)),
        ("aten._grouped_mm.default", [(30, 32), (4, 32, 16)], 1, (4, 8, 16, 32, True)),
    ],
)  # fmt: skip
def test_products_by_their_operators(
    target: str, shapes: list[tuple[int, ...]], weight: int | None, sizes: tuple[int, int, int, int, bool]
) -> None:
    count, m, n, k, held = sizes
    assert product(target, shapes, weight) == Product(
        dtype="float32", count=count, m=m, n=n, k=k, weight=held
    )


def test_an_outer_product_only_streams() -> None:
    assert isinstance(product("aten.bmm.default", [(1, 64, 1), (1, 1, 16)], None), Streaming)


def test_a_product_counts_for_what_is_fused_to_it() -> None:
    trace = tiny_trace()
    program = trace.programs[0]
    fused = replace(program.kernels[0], ops=(0, 1, 2))
    assert work_of(trace, program, fused) == Product(
        dtype="float32", count=1, m=ROWS, n=WIDTH, k=WIDTH, weight=True
    )
    alone = work_of(trace, program, program.kernels[1])
    assert isinstance(alone, Streaming) and alone.pointwise and alone.ops == 1


@pytest.mark.parametrize(
    ("target", "shapes", "more"),
    [
        ("_scaled_dot_product_flash_attention", [(2, 8, 16, 64), (2, 2, 16, 64)], [0.0, True]),
        ("_scaled_dot_product_cudnn_attention", [(2, 8, 16, 64), (2, 2, 16, 64)], [None, False, 0.0, True]),
        (
            "_scaled_dot_product_efficient_attention",
            [(2, 8, 16, 64), (2, 2, 16, 64)],
            [None, False, 0.0, True],
        ),
        ("_flash_attention_forward", [(2, 16, 8, 64), (2, 16, 2, 64)], [None, None, 16, 16, 0.0, True]),
        ("_efficient_attention_forward", [(2, 16, 8, 64), (2, 16, 2, 64)], [None] * 5 + [0.0, 1]),
        (
            "_cudnn_attention_forward",
            [(2, 8, 16, 64), (2, 2, 16, 64)],
            [None, None, None, 16, 16, False, 0.0, True],
        ),
    ],
)
def test_recorded_variants_of_attention(target: str, shapes: list[tuple[int, ...]], more: list[Any]) -> None:
    found = product(f"aten.{target}.default", [*shapes, shapes[1]], None, more)
    assert found == Attention(
        dtype="float32", phase="prefill", batch=2, queries=16, context=16, heads=8, kv_heads=2, head_dim=64,
        window=None,
    )  # fmt: skip


def test_a_profile_that_tells_shapes_alone_is_read_by_them() -> None:
    trace = tiny_trace()
    program = trace.programs[0]

    def read(target: str, *arguments: Any) -> Work:
        op = replace(program.ops[0], target=target, arguments={"args": list(arguments), "kwargs": {}})
        changed = replace(program, ops=(op, *program.ops[1:]))
        return work_of(trace, changed, program.kernels[0])

    rows, weight = ({"dtype": "bfloat16", "shape": list(shape)} for shape in ((8, 32), (32, 16)))
    assert read("aten.mm.unknown", rows, weight) == Product(
        dtype="float32", count=1, m=8, n=16, k=32, weight=True
    )
    assert isinstance(read("aten.mm.unknown", rows), Streaming)
    assert isinstance(read("aten.mm.unknown", rows, None), Streaming)
    assert isinstance(read("aten.mm.unknown", rows, {"dtype": "bfloat16", "shape": [32]}), Streaming)
    assert isinstance(read("aten.convolution.unknown", rows, weight), Streaming)


def test_a_search_for_the_largest_element_knows_its_rows() -> None:
    for phase in ("prefill", "decode"):
        (search,) = named("llama-3-8b-4-layers", phase, "argmax")
        assert isinstance(search, Streaming) and search.row_bytes == 128256 * 2
    selections = named("gpt-oss-20b-2-layers", "decode", "topk")
    assert selections and all(isinstance(work, Streaming) and work.sorts for work in selections)
