"""Launches that are no plain kernels with PTX: copies, fills, libraries, scratch, and what hides inside an op."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tessera_core.deps.graph import Access, load_deps
from tessera_core.deps.stage import DepsStage
from tessera_core.program.boxes import Box
from tessera_formats.deps import read_deps
from tests.deps.samples import Builder, launch, module_row, read, save, write

COUNT = 2048
BYTES = 2 * COUNT
CAPTURED = [{"name": "device", "value": "any"}]


def copy_row(
    kind: str, op: int, words: Sequence[int], relocations: Sequence[tuple[int, int, int]]
) -> dict[str, Any]:
    return {
        **launch(0, op, "", [], 0, blocks=1),
        "kind": kind,
        "module": None,
        "function": kind,
        "parameters": struct.pack(f"<{len(words)}Q", *words),
        "relocations": [
            {"offset": offset, "buffer": buffer, "byte_offset": inner}
            for offset, buffer, inner in relocations
        ],
    }


def of_target(path: Path) -> list[Access]:
    return [a for a in load_deps(path).accesses(0) if a.target == "sm_90"]


def one_op(kinds: str, target: str = "aten.copy_.default", must: bool = False) -> tuple[Builder, int]:
    """One kernel of one op: inputs, and as the last an output."""
    b = Builder()
    tensors = [b.tensor("input", COUNT, name) for name in kinds[:-1]] + [b.tensor("output", COUNT, kinds[-1])]
    b.kernel()
    op = b.op(target, *(read(t) for t in tensors[:-1]), write(tensors[-1], must))
    return b, op


def test_a_copy_and_a_fill_touch_exactly_what_their_words_say(tmp_path: Path) -> None:
    b, op = one_op("xy")
    # eight rows of 64 bytes, 256 apart in y (from byte 16) and 128 apart in x
    copied = copy_row("memcpy", op, (0, 0, 64, 8, 1, 256, 8, 128, 8), [(0, 1, 16), (8, 0, 0)])
    filled = {**copy_row("memset", op, (0, 7, 4, 32, 1, 0), [(0, 1, 2048)]), "launch": 1}
    save(tmp_path / "a.trace", b.trace(), [copied, filled], [], capture=CAPTURED)
    DepsStage().run(tmp_path / "a.trace", tmp_path / "a.deps")
    assert [
        (a.buffer, a.mode, a.must, a.boxes, a.precision, a.launch) for a in of_target(tmp_path / "a.deps")
    ] == [
        (0, "read", False, (Box.of(0, [(8, 128)], 64),), "exact", 0),
        (1, "write", True, (Box.of(16, [(8, 256)], 64),), "exact", 0),
        (1, "write", True, (Box.interval(2048, 128),), "exact", 1),
    ]


def test_a_copy_past_its_buffer_is_never_sure(tmp_path: Path) -> None:
    b, op = one_op("xy")
    copied = copy_row("memcpy", op, (0, 0, BYTES, 1, 1, 0, 0, 0, 0), [(0, 1, 16), (8, 0, 0)])
    save(tmp_path / "a.trace", b.trace(), [copied], [], capture=CAPTURED)
    DepsStage().run(tmp_path / "a.trace", tmp_path / "a.deps")
    (written,) = [a for a in of_target(tmp_path / "a.deps") if a.mode == "write"]
    assert (written.must, written.boxes, written.precision) == (False, None, "bounded")
    assert "past the end" in written.detail


def library_row(op: int, buffers: Sequence[int], number: int) -> dict[str, Any]:
    return {
        **launch(0, op, "", [(buffer, 0) for buffer in buffers], 0, blocks=1),
        "module": None,
        "function": "library_gemm",
        "launch": number,
    }


def mixed(path: Path, edges: Sequence[tuple[int, int]]) -> list[Access]:
    """x, g -> (PTX) scratch -> (library, with w) -> y; returns the target's accesses."""
    b, op = one_op("xgwy", "aten.mm.default", must=True)
    module = module_row()
    first = launch(0, op, module["module"], [(0, 0), (1, 0)], COUNT)
    rows = [first, library_row(op, (2, 3), 1)]
    owner = {"program": 0, "kernel": 0}
    pointers = [
        {**owner, "launch": 0, "offset": 16, "workspace": 0, "byte_offset": 0},
        {**owner, "launch": 1, "offset": 16, "workspace": 0, "byte_offset": 0},
    ]
    save(
        path / "a.trace",
        b.trace(),
        rows,
        [module],
        capture=CAPTURED,
        pointers=pointers,
        workspaces=[{"workspace": 0, "bytes": BYTES, "scope": "kernel"}],
        launch_edges=[{**owner, "source": s, "destination": d} for s, d in edges],
    )
    facts = DepsStage().run(path / "a.trace", path / "a.deps")
    assert any("launch of library_gemm: no PTX" in str(row) for t in facts.tables for row in t.rows)
    return of_target(path / "a.deps")


def test_a_library_beside_ptx_keeps_the_schema_for_what_it_reaches(tmp_path: Path) -> None:
    found = mixed(tmp_path, [(0, 1)])
    assert [(a.buffer, a.mode, a.must, a.evidence, a.launch) for a in found] == [
        (0, "read", False, "ptx", 0),
        (1, "read", False, "ptx", 0),
        (2, "read", False, "schema", 1),
        (3, "write", True, "schema", None),
    ]


def test_a_custom_op_that_was_not_captured_keeps_its_declaration_beside_its_launches(tmp_path: Path) -> None:
    """It may call operators of which nothing is recorded."""
    b, op = one_op("xgy", "mine.fused.default", must=True)
    module = module_row()
    rows = [launch(0, op, module["module"], [(0, 0), (1, 0), (2, 0)], COUNT)]
    save(tmp_path / "a.trace", b.trace(), rows, [module])
    DepsStage().run(tmp_path / "a.trace", tmp_path / "a.deps")
    reads = {(a.buffer, a.evidence) for a in of_target(tmp_path / "a.deps") if a.mode == "read"}
    assert reads == {(0, "ptx"), (0, "schema"), (1, "ptx"), (1, "schema")}
    save(tmp_path / "b.trace", b.trace(), rows, [module], capture=CAPTURED)
    DepsStage().run(tmp_path / "b.trace", tmp_path / "b.deps")
    assert {a.evidence for a in of_target(tmp_path / "b.deps")} == {"ptx"}


def carried(path: Path, scope: str) -> tuple[tuple[int, ...], ...]:
    """Two kernels: the first writes scratch, the second reads it before anything else. Returns the chains."""
    b = Builder()
    tensors = [b.tensor("input", COUNT, "x"), b.tensor("output", COUNT, "y")]
    module, rows, pointers = module_row(), [], []
    for kernel, (given, scratch_at) in enumerate((((0, 0), 16), ((0, 1), 0))):
        b.kernel("silu_multiply")
        accesses = [read(tensors[0], "declared")]
        accesses += [write(tensors[1], True, "declared")] if kernel else []
        op = b.op("triton.model:silu_multiply", *accesses)
        row = launch(kernel, op, module["module"], [], COUNT)
        places = [offset for offset in (0, 8, 16) if offset != scratch_at]
        row["relocations"] = [
            {"offset": offset, "buffer": buffer, "byte_offset": 0}
            for offset, buffer in zip(places, given, strict=True)
        ]
        rows.append(row)
        pointers.append(
            {
                "program": 0,
                "kernel": kernel,
                "launch": 0,
                "offset": scratch_at,
                "workspace": 0,
                "byte_offset": 0,
            }
        )
    save(
        path / "a.trace",
        b.trace(),
        rows,
        [module],
        capture=CAPTURED,
        pointers=pointers,
        workspaces=[{"workspace": 0, "bytes": BYTES, "scope": scope}],
    )
    DepsStage().run(path / "a.trace", path / "a.deps")
    assert all(a.buffer in (0, 1) for a in of_target(path / "a.deps"))
    return load_deps(path / "a.deps").chains(0)


def test_kernels_that_pass_data_through_a_librarys_scratch_share_a_device(tmp_path: Path) -> None:
    assert carried(tmp_path, "library") == ((0, 1),)


def test_scratch_of_a_kernel_ties_it_to_nobody(tmp_path: Path) -> None:
    assert carried(tmp_path, "kernel") == ()


def test_the_artifact_tells_blocks_apart(tmp_path: Path) -> None:
    b, op = one_op("xgy", "triton.model:silu_multiply", must=True)
    module = module_row()
    rows = [launch(0, op, module["module"], [(0, 0), (1, 0), (2, 0)], COUNT)]
    clustered = {**rows[0], "cluster": [2, 1, 1]}
    for name, found, independent in (("a", rows, True), ("b", [clustered], False)):
        save(tmp_path / f"{name}.trace", b.trace(), found, [module])
        DepsStage().run(tmp_path / f"{name}.trace", tmp_path / f"{name}.deps")
        bundle = read_deps(tmp_path / f"{name}.deps")
        (split,) = bundle.table("splits").to_pylist()
        assert (split["blocks"], split["independent"]) == (2, independent)
        forms = bundle.table("block_footprints").to_pylist()
        assert [(f["buffer"], f["mode"], f["must"], f["last"], f["step"]) for f in forms] == [
            (0, "read", False, [1, 0, 0], [2048, 0, 0]),
            (1, "read", False, [1, 0, 0], [2048, 0, 0]),
            (2, "write", True, [1, 0, 0], [2048, 0, 0]),
        ]
        assert all(f["boxes"] == [{"start": 0, "counts": [], "strides": [], "run": 2048}] for f in forms)
