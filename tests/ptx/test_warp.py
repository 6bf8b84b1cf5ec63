"""Values that the threads of a warp get from each other, against closed forms."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tessera_core.ptx.analysis import analyse_launch
from tests.ptx.launches import Pointer, launch_of
from tests.ptx.test_control_flow import kernel

THREADS = 64


@pytest.mark.parametrize(
    ("code", "index"),
    [
        ("shfl.sync.idx.b32 %r2, %r1, 5, 31, -1;", lambda i: i // 32 * 32 + 5),
        ("shfl.sync.bfly.b32 %r2|%p2, %r1, 9, 31, -1;", lambda i: i ^ 9),
        ("shfl.sync.up.b32 %r2, %r1, 3, 0, -1;", lambda i: i - 3 if i % 32 >= 3 else i),
        ("shfl.sync.down.b32 %r2, %r1, 3, 31, -1;", lambda i: i + 3 if i % 32 < 29 else i),
        ("shfl.sync.down.b32 %r2, %r1, 3, 0x181f, -1;", lambda i: i + 3 if i % 8 < 5 else i),
        ("and.b32 %r3, %r1, 3; shfl.sync.idx.b32 %r2, %r1, %r3, 31, -1;", lambda i: i // 32 * 32 + i % 4),
        (
            "shfl.sync.up.b32 %r2|%p2, %r1, 3, 0, -1; selp.b32 %r2, 1, 0, %p2;",
            lambda i: int(i % 32 >= 3),
        ),
        (
            "setp.lt.u32 %p1, %r1, 40; vote.sync.ballot.b32 %r3, %p1, -1; popc.b32 %r2, %r3;",
            lambda i: 32 if i < 32 else 8,
        ),
        ("setp.lt.u32 %p1, %r1, 40; vote.sync.any.pred %p2, %p1, -1; selp.b32 %r2, 1, 0, %p2;", lambda i: 1),
        (
            "setp.lt.u32 %p1, %r1, 40; vote.sync.all.pred %p2, %p1, -1; selp.b32 %r2, 1, 0, %p2;",
            lambda i: int(i < 32),
        ),
        (
            "redux.sync.add.s32 %r2, %r1, -1; shr.u32 %r2, %r2, 4;",
            lambda i: sum(range(i // 32 * 32, i // 32 * 32 + 32)) >> 4,
        ),
        ("redux.sync.max.u32 %r2, %r1, -1;", lambda i: i // 32 * 32 + 31),
        ("mov.u32 %r3, %lanemask_lt; popc.b32 %r2, %r3;", lambda i: i % 32),
        ("mov.u32 %r3, %lanemask_ge; popc.b32 %r2, %r3;", lambda i: 32 - i % 32),
        ("mov.u32 %r2, %laneid;", lambda i: i % 32),
        ("add.cc.u32 %r3, %r1, -8; addc.u32 %r2, 0, 0;", lambda i: int(i >= 8)),
        ("sub.cc.u32 %r3, %r1, 8; subc.u32 %r4, 3, 0; mov.b32 %r2, %r4;", lambda i: 3 - int(i < 8)),
    ],
)
def test_exchanges_within_whole_warps_are_exact(code: str, index: Callable[[int], int]) -> None:
    parsed = kernel(
        f"{code} mul.wide.u32 %rd7, %r2, 4; add.s64 %rd6, %rd2, %rd7; st.global.u32 [%rd6], %r1; ret;"
    )
    launch = launch_of(parsed, "k", (2, 1, 1), (THREADS, 1, 1), (Pointer(0), Pointer(1), 0))
    (write,) = analyse_launch(parsed, launch, {0: 4096, 1: 4096}).accesses
    assert write.must and write.precision == "exact" and write.boxes is not None
    claimed = {at for box in write.boxes for low, high in box.intervals() for at in range(low, high, 4)}
    assert claimed == {4 * index(i) for i in range(THREADS)}


@pytest.mark.parametrize(
    "code",
    [
        # a part of the warp, a lane that memory names, a lane that is not there
        "setp.lt.u32 %p1, %r1, 20; @!%p1 ret; shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;",
        "ld.global.u32 %r3, [%rd4]; shfl.sync.idx.b32 %r2, %r1, %r3, 31, -1;",
        "elect.sync %r2|%p1, -1;",
        "setp.lt.u32 %p1, %r1, 20; @%p1 shfl.sync.idx.b32 %r2, %r1, 0, 31, -1; @!%p1 ret;",
    ],
)
def test_other_exchanges_give_the_value_of_any_lane(code: str) -> None:
    parsed = kernel(
        f"{code} mul.wide.u32 %rd7, %r2, 4; add.s64 %rd6, %rd2, %rd7; st.global.u32 [%rd6], %r1; ret;"
    )
    launch = launch_of(parsed, "k", (1, 1, 1), (32, 1, 1), (Pointer(0), Pointer(1), 0))
    accesses = analyse_launch(parsed, launch, {0: 4096, 1: 4096}).accesses
    (write,) = [access for access in accesses if access.mode == "write"]
    assert not write.must and write.boxes is not None
    assert (write.boxes[0].low, write.boxes[-1].high) == (0, 128)
