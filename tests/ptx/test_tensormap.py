"""Tensor maps: decoding, clipping, joining of tiles, and the layout itself against what makes and reads it."""

from __future__ import annotations

import itertools
import json
import lzma
import re
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixtures.ptx import archive
from tessera_core.program.boxes import Box
from tessera_core.ptx.analysis import LaunchShape, PtxAccess, Relocation, analyse_launch
from tessera_core.ptx.parser import parse_module
from tessera_core.ptx.tensormap import Ranges, TensorMap, coalesce, decode_tensor_map
from tests.ptx.effect_cases import HALF, tensor_map
from tests.ptx.test_effects import assembler


def test_fields() -> None:
    content = tensor_map((64, 32, 5), (128, 1 << 38), (16, 8, 1), HALF, steps=(1, 2, 1))
    assert decode_tensor_map(content, 7, 256) == TensorMap(
        buffer=7,
        offset=256,
        extents=(64, 32, 5),
        strides=(2, 128, 1 << 38),
        box_extents=(16, 8, 1),
        element_strides=(1, 2, 1),
    )


@pytest.mark.parametrize(
    ("flags", "length"),
    [(13 << 7, 128), (1 << 11, 128), (2 << 11, 128), (5 << 4, 128), (0, 64)],
    ids=["packed elements", "interleaved by 16", "interleaved by 32", "six dimensions", "cut off"],
)
def test_forms_that_are_not_decoded(flags: int, length: int) -> None:
    content = bytearray(128)
    struct.pack_into("<I", content, 8, flags)
    assert decode_tensor_map(bytes(content[:length]), 0, 0) is None


@st.composite
def tensors(draw: st.DrawFn) -> TensorMap:
    rank = draw(st.integers(1, 4))
    extents = [draw(st.integers(1, 7)) for _ in range(rank)]
    strides, reach = [2], 2 * extents[0]
    for extent in extents[1:]:
        strides.append(-(-reach // 16) * 16 + 16 * draw(st.integers(0, 2)))
        reach = strides[-1] * extent
    box = [draw(st.integers(1, 5)) for _ in range(rank)]
    content = tensor_map(extents, strides[1:], box, HALF)
    decoded = decode_tensor_map(content, 0, draw(st.integers(0, 64)))
    assert decoded is not None and decoded.extents == tuple(extents) and decoded.strides == tuple(strides)
    return decoded


def marked(boxes: list[Box]) -> set[int]:
    return {byte for box in boxes for low, high in box.intervals() for byte in range(low, high)}


def elements(tensor: TensorMap, ranges: Ranges) -> set[int]:
    places = itertools.product(*(range(low, high) for low, high in ranges))
    starts = {
        tensor.offset + sum(i * s for i, s in zip(place, tensor.strides, strict=True)) for place in places
    }
    return {start + byte for start in starts for byte in range(tensor.strides[0])}


@given(tensors(), st.lists(st.integers(-6, 9), min_size=4, max_size=4))
def test_a_tile_is_its_box_clipped_by_the_tensor(tensor: TensorMap, corner: list[int]) -> None:
    rank = len(tensor.extents)
    tile = tensor.tile([(place, place) for place in corner[:rank]])
    wanted = tuple(
        (max(0, c), min(e, c + b))
        for c, e, b in zip(corner, tensor.extents, tensor.box_extents, strict=False)
    )
    if any(low >= high for low, high in wanted):
        assert tile is None
    else:
        assert tile == wanted and marked([tensor.box(tile)]) == elements(tensor, tile)
    assert tensor.tile([None] * rank) == tensor.whole()


@st.composite
def many_ranges(draw: st.DrawFn) -> list[Ranges]:
    rank = draw(st.integers(1, 3))
    one = st.tuples(st.integers(0, 6), st.integers(1, 4)).map(lambda pair: (pair[0], pair[0] + pair[1]))
    return draw(st.lists(st.tuples(*[one] * rank), max_size=12))


@given(many_ranges())
def test_joining_tiles_loses_and_adds_nothing(ranges: list[Ranges]) -> None:
    def cells(some: list[Ranges]) -> set[tuple[int, ...]]:
        return {cell for item in some for cell in itertools.product(*(range(a, b) for a, b in item))}

    joined = coalesce(ranges)
    assert cells(joined) == cells(ranges) and len(joined) <= len(ranges)


def test_a_grid_of_tiles_becomes_one_range() -> None:
    grid = [((x, x + 16), (y, y + 8)) for x in range(0, 64, 16) for y in range(0, 32, 8)]
    assert coalesce(grid) == [((0, 64), (0, 32))]


def accesses(text: str, blocks: int, extents: tuple[int, int]) -> tuple[PtxAccess, ...]:
    """What `blocks` blocks of one thread do through a map of 16 by 8 halves at %rd1 over buffer 5; %r1 is the block."""
    parsed = parse_module(
        f""".version 8.8\n.target sm_90a\n.address_size 64
        .entry k(.param .align 64 .b8 m[128], .param .u64 p) {{ .reg .b32 %r<10>; .reg .b64 %rd<9>; .reg .pred %p<2>;
        .shared .align 128 .b8 s[1024];
        mov.b64 %rd1, m; mov.b32 %r9, s; ld.param.u64 %rd2, [p]; mov.u32 %r1, %ctaid.x; mov.b32 %r2, 0;
        {text} ret; }}"""
    )
    launch = LaunchShape(
        entry="k",
        grid=(blocks, 1, 1),
        block=(1, 1, 1),
        shared_bytes=0,
        parameters=tensor_map(extents, (128,), (16, 8), HALF) + bytes(8),
        relocations=(Relocation(0, 5, 256), Relocation(128, 6, 0)),
    )
    return analyse_launch(parsed, launch, {5: 8192, 6: 4096}).accesses


LOAD = "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r9], [%rd1, {%r2, %r3}], [%r9];"


def test_a_walk_along_rows_is_one_box_clipped_by_the_tensor() -> None:
    loop = f"shl.b32 %r3, %r1, 3; L: {LOAD} add.s32 %r2, %r2, 16; setp.lt.s32 %p1, %r2, 60; @%p1 bra L;"
    (access,) = accesses(loop, 4, (60, 30))
    assert (access.buffer, access.mode, access.must, access.precision) == (5, "read", False, "exact")
    assert access.boxes == (Box(256, ((30, 128),), 120),)


def test_tiles_on_a_diagonal_are_told_apart() -> None:
    (access,) = accesses(f"shl.b32 %r3, %r1, 3; shl.b32 %r2, %r1, 4; {LOAD}", 3, (64, 32))
    assert access.precision == "exact" and access.boxes is not None
    wanted = [Box(256 + 32 * i + 8 * 128 * i, ((8, 128),), 32) for i in range(3)]
    assert marked(list(access.boxes)) == marked(wanted)


def test_a_tile_whose_place_is_loaded_may_be_anywhere_in_the_tensor() -> None:
    found = accesses(f"ld.global.u32 %r3, [%rd2]; {LOAD}", 2, (64, 8))
    (access,) = (access for access in found if access.buffer == 5)
    assert (access.must, access.precision, access.boxes) == (False, "bounded", (Box(256, ((8, 128),), 32),))


# What `tensormap.replace` of each field must do to the map, as SASS: the constants that appear in the store's offset
# and in the masks. The layout in the module's docstring says the same.
FIELDS = [
    ("global_address.global.b1024.b64 [%rd1], %rd2", "", ()),
    ("rank.global.b1024.b32 [%rd1], %r1", "0x8", ("0x70",)),
    ("global_dim.global.b1024.b32 [%rd1], 0, %r1", "0x20", ()),
    ("global_dim.global.b1024.b32 [%rd1], 4, %r1", "0x30", ()),
    ("global_stride.global.b1024.b64 [%rd1], 0, %rd2", "0xc", ("0xf", "0x4")),
    ("global_stride.global.b1024.b64 [%rd1], 3, %rd2", "0x18", ("0xf000", "0x4")),
    ("box_dim.global.b1024.b32 [%rd1], 0, %r1", "0x34", ("0xff000000",)),
    ("box_dim.global.b1024.b32 [%rd1], 4, %r1", "0x38", ("0xff000000",)),
    ("element_stride.global.b1024.b32 [%rd1], 0, %r1", "0x34", ("0x7",)),
    ("element_stride.global.b1024.b32 [%rd1], 4, %r1", "0x34", ("0x7000",)),
    ("interleave_layout.global.b1024.b32 [%rd1], 2", "0x8", ("0x1000",)),
]


def test_the_assembler_writes_fields_where_we_read_them(tmp_path: Path) -> None:
    disassembler = assembler().parent / "nvdisasm"
    if not disassembler.exists():
        pytest.skip("this build of triton brings no disassembler")
    source, binary = tmp_path / "replace.ptx", tmp_path / "replace.cubin"
    kernels = (
        f""".entry k{index}(.param .u64 a, .param .u64 v, .param .u32 w) {{ .reg .b64 %rd<4>; .reg .b32 %r<2>;
        ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [v]; ld.param.u32 %r1, [w]; cvta.to.global.u64 %rd1, %rd1;
        tensormap.replace.tile.{field}; ret; }}"""
        for index, (field, _, _) in enumerate(FIELDS)
    )
    source.write_text("\n".join((".version 8.8\n.target sm_100a\n.address_size 64", *kernels)))
    subprocess.run([str(assembler()), "-arch=sm_100a", str(source), "-o", str(binary)], check=True)
    listing = subprocess.run(
        [str(disassembler), "-c", str(binary)], capture_output=True, text=True, check=True
    )
    codes = dict(re.findall(r"\n\.text\.k(\d+):(.*?)(?=\n\.text\.k|\Z)", listing.stdout, re.DOTALL))
    assert len(codes) == len(FIELDS)
    for index, (field, offset, constants) in enumerate(FIELDS):
        code = codes[str(index)]
        stored = re.findall(r"STG\.E\S* desc\[\w+\]\[R\d+\.64(?:\+(0x[0-9a-f]+))?\]", code)
        assert offset in stored, field
        assert all(re.search(rf"\b{constant}\b", code) for constant in constants), field


def test_what_the_driver_encoded_is_decoded() -> None:
    with lzma.open(archive.HERE / "gpu.json.xz") as file:
        encoded = [row for row in json.load(file)["tensor_maps"] if "bytes" in row]
    assert len(encoded) >= 100
    for row in encoded:
        content, item = bytes.fromhex(row["bytes"]), row["elem_size"]
        assert int.from_bytes(content[:8], "little") == row["address"]
        assert decode_tensor_map(content, 3, 512) == TensorMap(
            buffer=3,
            offset=512,
            extents=tuple(reversed(row["shape"])),
            strides=tuple(item * stride for stride in reversed(row["strides"])),
            box_extents=tuple(reversed(row["block_size"])),
            element_strides=(1,) * len(row["shape"]),
        )


@pytest.mark.gpu
def test_the_driver_encodes_what_we_decode() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="the cuda extra brings the driver's bindings")
    import torch

    buffer = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    choice = np.random.default_rng(0)
    kinds = driver.CUtensorMapDataType
    sizes = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2, 10: 4, 11: 4, 12: 4}
    for _ in range(200):
        rank = int(choice.integers(1, 6))
        kind = int(choice.integers(0, 13))
        extents = [int(x) for x in choice.integers(1, 9, rank)]
        box = [int(x) for x in choice.integers(1, 5, rank)]
        box[0] = 16 // sizes[kind] * int(choice.integers(1, 3))
        strides, reach = [], extents[0] * sizes[kind]
        for extent in extents[1:]:
            strides.append(-(-reach // 16) * 16)
            reach = strides[-1] * extent
        offset = 16 * int(choice.integers(0, 64))
        error, encoded = driver.cuTensorMapEncodeTiled(
            kinds(kind),
            rank,
            buffer.data_ptr() + offset,
            [driver.cuuint64_t(x) for x in extents],
            [
                driver.cuuint64_t(x) for x in strides or [16]
            ],  # of one dimension too, a pointer to strides is wanted
            [driver.cuuint32_t(x) for x in box],
            [driver.cuuint32_t(1)] * rank,
            driver.CUtensorMapInterleave(0),
            driver.CUtensorMapSwizzle(0),
            driver.CUtensorMapL2promotion(0),
            driver.CUtensorMapFloatOOBfill(0),
        )
        assert error == driver.CUresult.CUDA_SUCCESS
        content = struct.pack("<16Q", *(int(word) for word in encoded.opaque))
        assert int.from_bytes(content[:8], "little") == buffer.data_ptr() + offset
        decoded = decode_tensor_map(content, 0, offset)
        assert decoded == TensorMap(
            buffer=0,
            offset=offset,
            extents=tuple(extents),
            strides=(sizes[kind], *strides),
            box_extents=tuple(box),
            element_strides=(1,) * rank,
        )
