"""The oracles themselves: the suite is as large as it claims, the emulator computes, instrumented PTX notes."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from fixtures.ptx import archive
from fixtures.ptx.archive import StoredLaunch
from tests.ptx.oracle.arithmetic import NotModelledError, compute
from tests.ptx.oracle.instrument import ARENA, instrument
from tests.ptx.oracle.machine import BUFFER, Machine, observe
from tests.ptx.oracle.reader import read

GUARD_BYTES = 64


def launch_of(module: str, kernel: str, number: int = 0) -> StoredLaunch:
    return next(x for x in archive.launches() if (x.module, x.kernel, x.launch) == (module, kernel, number))


def test_the_suite_is_as_large_as_it_claims() -> None:
    modules = archive.modules()
    kernels = archive.suite()["kernels"]
    assert len(modules) >= 200 and len(kernels) >= 60
    assert all(module.ptxas.startswith("ptxas ") for module in modules.values())
    assert sum(len(launches) for launches in archive.observed().values()) >= 300
    assert {launch.kernel for launch in archive.launches()} == set(archive.observed())


def test_every_module_can_be_read() -> None:
    for module in archive.modules().values():
        routines = read(module.text).routines
        assert set(module.kernels) <= {name for name, routine in routines.items() if routine.kernel}


def test_the_emulator_computes() -> None:
    """A block-wide sum through shared memory, to the last bit of what is stored."""
    launch = launch_of("shared.nvcc.sm_90a", "block_reduce", 1)
    content = archive.contents(launch)
    machine = Machine(read(archive.modules()[launch.module].text), launch, content)
    machine.run()
    values = np.zeros(1024, dtype=np.float32)
    values[:1000] = np.frombuffer(content[0], dtype=np.float32)
    halves = values.reshape(8, 128)
    while halves.shape[1] > 1:
        halves = halves[:, : halves.shape[1] // 2] + halves[:, halves.shape[1] // 2 :]
    stored = machine.store[4000:4032].view(np.float32)
    assert np.array_equal(stored, halves.ravel())


@pytest.mark.parametrize(
    ("opcode", "sources", "result"),
    [
        ("add.s32", (0xFFFFFFFF, 2), 1),
        ("mul.wide.s32", (0xFFFFFFFF, 2), 0xFFFFFFFFFFFFFFFE),
        ("mul.hi.u32", (0x80000000, 6), 3),
        ("mul.hi.u64", (1 << 63, 6), 3),
        ("div.s32", (0xFFFFFFF9, 2), 0xFFFFFFFD),
        ("rem.s32", (0xFFFFFFF9, 2), 0xFFFFFFFF),
        ("shr.s32", (0x80000000, 40), 0xFFFFFFFF),
        ("shl.b32", (1, 32), 0),
        ("bfe.s32", (0xF0, 4, 4), 0xFFFFFFFF),
        ("bfe.u32", (0xF0, 4, 4), 0xF),
        ("bfi.b32", (0xAB, 0x11223344, 8, 8), 0x1122AB44),
        ("prmt.b32", (0x33221100, 0x77665544, 0x7531), 0x77553311),
        (
            "lop3.b32",
            (0xF0F0, 0xCCCC, 0xAAAA, 0xE8),
            0xE8E8,
        ),
        ("brev.b32", (1,), 0x80000000),
        ("clz.b32", (0x00010000,), 15),
        ("popc.b64", (0xFF00FF,), 16),
        ("shf.l.wrap.b32", (0x80000000, 1, 1), 3),
        ("min.s32", (0xFFFFFFFF, 1), 0xFFFFFFFF),
        ("min.u32", (0xFFFFFFFF, 1), 1),
        ("cvt.s64.s32", (0x80000000,), 0xFFFFFFFF80000000),
        ("cvt.rzi.s32.f32", (0xC0200000,), 0xFFFFFFFE),
        ("fma.rn.f32", (0x40000000, 0x40400000, 0x3F800000), 0x40E00000),
    ],
)
def test_arithmetic_by_the_manual(opcode: str, sources: tuple[int, ...], result: int) -> None:
    arrays = [np.array([source], dtype=np.uint64) for source in sources]
    assert int(compute(opcode.split("."), arrays)[0]) == result


def test_an_address_that_is_not_modelled_is_refused() -> None:
    launch = launch_of("histogram_atomic.sm_80", "histogram_atomic")
    text = archive.modules()[launch.module].text
    observe(text, launch, archive.contents)
    with pytest.raises(NotModelledError, match="is unknown"):
        observe(re.sub(r"\bm(ul|ad)\.wide", "frobnicate.wide", text), launch, archive.contents)


NOTED = [
    ("relu.sm_80", "relu"),
    ("grouped_matmul.sm_80", "grouped_matmul"),
    ("histogram_atomic.sm_90", "histogram_atomic"),
    ("maps.nvcc.sm_90a", "vector_with_tail"),
    ("maps.nvcc.sm_90a", "byte_swizzle"),
    ("functions.nvcc.sm_90a", "called_functions"),
    ("asynchronous.nvcc.sm_90a", "copy_async"),
    ("asynchronous.nvcc.sm_90a", "bulk_copy"),
    ("atomics.nvcc.sm_90a", "many_kinds"),
]


@pytest.mark.parametrize(("module", "kernel"), NOTED)
def test_instrumented_ptx_notes_what_the_emulator_sees(module: str, kernel: str) -> None:
    """The instrumented kernel runs in the emulator on one arena, with its maps as further buffers."""
    launch = launch_of(module, kernel, 1)
    starts, at = [], 0
    for size in launch.sizes().values():
        starts.append(at)
        at += -(-size // 256) * 256 + GUARD_BYTES * 4
    arena = bytearray(at)
    addresses = {buffer: (1 << BUFFER) + start for buffer, start in enumerate(starts)}
    for buffer, content in archive.contents(launch, 0, addresses).items():
        arena[starts[buffer] : starts[buffer] + len(content)] = content
    moved = replace(
        launch,
        relocations=tuple((offset, 0, starts[buffer] + byte) for offset, buffer, byte in launch.relocations),
        buffers={"arena": at, "reads": at, "writes": at},
    )
    program = read(instrument(archive.modules()[module].text).text)
    maps = [(number << BUFFER) for number in (2, 3)]
    words = np.array([1 << BUFFER, at, *maps], dtype=np.uint64).tobytes()
    next(v for v in program.variables if v.name == ARENA).content = words
    machine = Machine(program, moved, {0: bytes(arena), 1: bytes(at), 2: bytes(at)})
    machine.run()
    expected = observe(archive.modules()[module].text, launch, archive.contents)
    for mode, low in (("read", at), ("write", 2 * at)):
        wanted = np.zeros(at, dtype=np.bool_)
        for buffer, runs in expected[mode].items():
            for start, end in zip(runs[::2], runs[1::2], strict=True):
                wanted[starts[buffer] + start : starts[buffer] + end] = True
        assert np.array_equal(machine.store[low : low + at] != 0, wanted), mode
