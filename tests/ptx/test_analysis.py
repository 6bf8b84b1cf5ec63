"""The public door: names, sizes and offsets of buffers, and what happens at the edges."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tessera_core.program.boxes import Box
from tessera_core.ptx.analysis import LaunchShape, analyse_launch
from tessera_core.ptx.parser import parse_module
from tessera_formats.errors import InputError
from tests.ptx.launches import Pointer, launch_of, module
from tests.ptx.test_control_flow import HEAD

ROWS, HIDDEN = 4, 1000


def rms_norm(x: Pointer, weight: Pointer, out: Pointer) -> LaunchShape:
    arguments = (x, weight, out, 1024, HIDDEN, 1e-5)
    return launch_of(module("rms_norm.sm_90"), "rms_norm", (ROWS, 1, 1), (128, 1, 1), arguments)


def boxes(launch: LaunchShape, sizes: dict[int, int]) -> dict[tuple[int, str], tuple[Box, ...] | None]:
    analysis = analyse_launch(module("rms_norm.sm_90"), launch, sizes)
    return {(access.buffer, access.mode): access.boxes for access in analysis.accesses}


def test_boxes_start_at_the_buffer_and_follow_its_name() -> None:
    rows = Box(512, ((ROWS, 2048),), 2 * HIDDEN)
    for x, weight, out in ((0, 1, 2), (70, 5, 6)):
        launch = rms_norm(Pointer(x, 512), Pointer(weight), Pointer(out, 512))
        assert boxes(launch, dict.fromkeys((x, weight, out), 20_000)) == {
            (x, "read"): (rows,),
            (weight, "read"): (Box(0, (), 2 * HIDDEN),),
            (out, "write"): (rows,),
        }


def test_pointers_into_one_buffer_are_merged() -> None:
    launch = rms_norm(Pointer(3), Pointer(3, 8192), Pointer(3, 16384))
    merged = boxes(launch, {3: 30_000})
    assert merged[3, "write"] == (Box(16384, ((ROWS, 2048),), 2 * HIDDEN),)
    read = merged[3, "read"]
    assert read is not None and sum(box.bytes for box in read) == (ROWS + 1) * 2 * HIDDEN
    assert (read[0].low, read[-1].high) == (0, 8192 + 2 * HIDDEN)


def test_raw_pointer_bytes_do_not_matter() -> None:
    launch = rms_norm(Pointer(0), Pointer(1), Pointer(2))
    filled = bytearray(launch.parameters)
    filled[0:8] = b"\xff" * 8
    other = LaunchShape(
        entry=launch.entry,
        grid=launch.grid,
        block=launch.block,
        shared_bytes=launch.shared_bytes,
        parameters=bytes(filled),
        relocations=launch.relocations,
    )
    sizes = dict.fromkeys(range(3), 10_000)
    assert boxes(launch, sizes) == boxes(other, sizes)


def test_addresses_past_the_end_claim_the_allocation_and_nothing_sure_there() -> None:
    analysis = analyse_launch(
        module("rms_norm.sm_90"), rms_norm(Pointer(0), Pointer(1), Pointer(2)), {0: 9000, 1: 9000, 2: 4000}
    )
    writes = [access for access in analysis.accesses if access.mode == "write"]
    assert [(access.must, access.boxes, access.precision) for access in writes] == [(False, None, "bounded")]
    assert "past the end" in writes[0].reason


def test_many_scattered_ranges_are_coarsened_on_the_safe_side() -> None:
    parsed = parse_module(
        f"""{HEAD}.visible .entry k(.param .u64 out) {{
        .reg .b32 %r<9>; .reg .b64 %rd<9>;
        ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x;
        mul.lo.u32 %r2, %r1, %r1; mul.wide.u32 %rd2, %r2, 4; add.s64 %rd3, %rd1, %rd2; st.global.u32 [%rd3], %r1; ret;
        }}"""
    )
    launch = launch_of(parsed, "k", (1, 1, 1), (256, 1, 1), (Pointer(0),))
    sure, perhaps = analyse_launch(parsed, launch, {0: 1 << 20}).accesses
    assert (sure.must, perhaps.must, perhaps.precision) == (True, False, "bounded")
    squares = {4 * i * i for i in range(256)}
    assert sure.boxes is not None and perhaps.boxes is not None
    claimed = {start for box in sure.boxes for low, high in box.intervals() for start in range(low, high, 4)}
    assert claimed <= squares
    assert all(any(box.low <= square < box.high for box in perhaps.boxes) for square in squares)


@pytest.mark.parametrize(
    ("code", "index"),
    [
        ("not.b32 %r2, %r1; add.s32 %r2, %r2, 32;", lambda i: 31 - i),
        ("sub.s32 %r3, %r1, 16; abs.s32 %r2, %r3;", lambda i: abs(i - 16)),
        ("neg.s32 %r3, %r1; add.s32 %r2, %r3, 31;", lambda i: 31 - i),
        ("min.s32 %r2, %r1, 9;", lambda i: min(i, 9)),
        ("max.u32 %r2, %r1, 9;", lambda i: max(i, 9)),
        ("rem.u32 %r2, %r1, 5;", lambda i: i % 5),
        ("div.u32 %r2, %r1, 5;", lambda i: i // 5),
        ("mul.hi.u32 %r2, %r1, -1431655765;", lambda i: i * 0xAAAAAAAB >> 32),
        ("bfe.u32 %r2, %r1, 1, 3;", lambda i: i >> 1 & 7),
        ("and.b32 %r3, %r1, 3; shl.b32 %r4, %r1, 2; or.b32 %r2, %r4, %r3;", lambda i: i << 2 | i & 3),
        ("xor.b32 %r2, %r1, 5;", lambda i: i ^ 5),
        ("shr.u32 %r2, %r1, 2;", lambda i: i >> 2),
        (
            "add.s32 %r3, %r1, -1; setp.lt.u32 %p1, %r3, 9; selp.b32 %r2, %r1, 40, %p1;",
            lambda i: i if 1 <= i < 10 else 40,
        ),
        ("cvt.u32.u8 %r3, %r1; cvt.s64.s32 %rd7, %r3; cvt.u32.u64 %r2, %rd7;", lambda i: i),
        ("mov.b64 %rd7, {%r9, %r1}; mov.b64 {%r8, %r2}, %rd7;", lambda i: i),
    ],
)
def test_arithmetic_on_thread_indices_is_exact(code: str, index: Callable[[int], int]) -> None:
    parsed = parse_module(
        f"""{HEAD}.visible .entry k(.param .u64 out) {{
        .reg .pred %p<9>; .reg .b32 %r<20>; .reg .b64 %rd<9>;
        ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mov.u32 %r9, 7; {code}
        mul.wide.u32 %rd2, %r2, 4; add.s64 %rd3, %rd1, %rd2; st.global.u32 [%rd3], %r1; ret;
        }}"""
    )
    launch = launch_of(parsed, "k", (1, 1, 1), (32, 1, 1), (Pointer(0),))
    (write,) = analyse_launch(parsed, launch, {0: 4096}).accesses
    assert write.must and write.precision == "exact" and write.boxes is not None
    claimed = {at for box in write.boxes for low, high in box.intervals() for at in range(low, high, 4)}
    assert claimed == {4 * index(i) for i in range(32)}


def test_an_empty_grid_touches_nothing() -> None:
    launch = rms_norm(Pointer(0), Pointer(1), Pointer(2))
    empty = LaunchShape(
        entry=launch.entry,
        grid=(0, 1, 1),
        block=launch.block,
        shared_bytes=0,
        parameters=launch.parameters,
        relocations=launch.relocations,
    )
    assert analyse_launch(module("rms_norm.sm_90"), empty, {0: 1, 1: 1, 2: 1}).accesses == ()


def test_a_kernel_that_is_not_there_is_named() -> None:
    launch = rms_norm(Pointer(0), Pointer(1), Pointer(2))
    with pytest.raises(InputError, match=r"rms_norm.*name one of: softmax"):
        analyse_launch(module("softmax.sm_90"), launch, {})
