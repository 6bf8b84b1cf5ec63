"""The whole stage on traces built by hand, with real PTX in the captured target."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from tessera_core.deps.graph import load_deps
from tessera_core.deps.stage import DepsStage
from tessera_core.program.boxes import Box
from tessera_core.program.store import load_trace
from tessera_core.report.facts import Facts, FactTable
from tessera_formats.deps import read_deps
from tessera_formats.errors import (
    ArtifactError,
    InputError,
    ModelError,
    OriginError,
    PtxSyntaxError,
    VerificationError,
)
from tessera_formats.trace import check_same_program
from tests.deps.samples import Builder, launch, module_row, read, save, write

COUNT = 2048
WHOLE = (Box.interval(0, 2 * COUNT),)


def silu_trace(path: Path, *, out_must: bool = True, count: int = COUNT) -> Path:
    """x -> gate, up -> silu_multiply (Triton) -> y; the launch handles the first ``count`` elements."""
    b = Builder()
    x = b.tensor("input", COUNT, "x")
    gate, up = b.tensor("activation", COUNT), b.tensor("activation", COUNT)
    out, y = b.tensor("activation", COUNT), b.tensor("output", COUNT, "y")
    for made in (gate, up):
        b.kernel("matmul")
        b.op("aten.mm.default", read(x), write(made))
    b.kernel("silu_multiply")
    b.op("aten.empty.memory_format", write(out, must=False))
    operands = (read(gate, "declared"), read(up, "declared"), write(out, out_must, "declared"))
    op = b.op("triton.model:silu_multiply", *operands)
    b.kernel("add")
    b.op("aten.add.Tensor", read(out), read(x), write(y))
    module = module_row()
    pointers = [(b.tensors[t].buffer, 0) for t in (gate, up, out)]
    return save(path, b.trace(), [launch(2, op, module["module"], pointers, count)], [module])


def test_ptx_stands_in_for_declarations_of_its_own_target(tmp_path: Path) -> None:
    trace = silu_trace(tmp_path / "a.trace", out_must=False)
    facts = DepsStage().run(trace, tmp_path / "a.deps")
    deps = load_deps(tmp_path / "a.deps")
    assert deps.targets == ("ops", "sm_90")
    assert deps.program_digest == load_trace(trace).digest
    silu = [a for a in deps.accesses(0) if a.kernel == 2]
    assert [(a.target, a.evidence, a.mode, a.must, a.precision) for a in silu] == [
        ("ops", "declared", "read", False, "bounded"),
        ("ops", "declared", "read", False, "bounded"),
        ("ops", "declared", "write", False, "bounded"),
        ("sm_90", "ptx", "read", False, "exact"),
        ("sm_90", "ptx", "read", False, "exact"),
        ("sm_90", "ptx", "write", True, "exact"),
    ]
    assert all(a.boxes == WHOLE for a in silu)
    assert {a.kernel for a in deps.accesses(0) if a.target == "sm_90"} == {2}
    edges = read_deps(tmp_path / "a.deps").table("edges").to_pylist()
    proven = {(e["target"], e["source"], e["destination"]): (e["must"], e["evidence"]) for e in edges}
    assert proven == {
        ("ops", 0, 2): (True, "declared"),
        ("ops", 1, 2): (True, "declared"),
        ("ops", 2, 3): (False, "declared"),
        ("sm_90", 0, 2): (True, "schema"),
        ("sm_90", 1, 2): (True, "schema"),
        ("sm_90", 2, 3): (True, "schema"),
    }
    union = {(e.source, e.destination): (e.must, e.evidence, e.hazard) for e in deps.edges(0)}
    assert union[2, 3] == (False, "declared", "RAW")
    coverage = {row[:3]: row[3:] for table in facts.tables if table.title == "coverage" for row in table.rows}
    assert coverage["sm_90", "ptx", "exact"] == (3, 1, 0)
    assert coverage["ops", "declared", "bounded"] == (3, 1, 3)
    assert coverage["ops", "schema", "exact"] == (3, 3, 0)


def test_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    trace = silu_trace(tmp_path / "a.trace")
    for name in ("a.deps", "b.deps"):
        DepsStage().run(trace, tmp_path / name)
    first, second = (
        {p.relative_to(tmp_path / name): p.read_bytes() for p in (tmp_path / name).rglob("*") if p.is_file()}
        for name in ("a.deps", "b.deps")
    )
    assert first == second


def test_the_artifact_gives_back_what_was_found(tmp_path: Path) -> None:
    trace = silu_trace(tmp_path / "a.trace")
    DepsStage(("ops",)).run(trace, tmp_path / "a.deps")
    read_deps(tmp_path / "a.deps").check()
    deps = load_deps(tmp_path / "a.deps")
    assert deps.targets == ("ops",)
    raw = [(e.source, e.destination, e.boxes, e.must) for e in deps.edges(0)]
    assert raw == [(0, 2, WHOLE, True), (1, 2, WHOLE, True), (2, 3, WHOLE, True)]
    assert deps.ordering(0) == ((0, 2), (1, 2), (2, 3))
    assert deps.edges(7) == deps.accesses(7) == deps.chains(7) == ()


def test_ptx_that_writes_an_argument_declared_as_read_is_refused(tmp_path: Path) -> None:
    """The model declares out as read and gate as written; the PTX does the opposite."""
    b = Builder()
    gate, up, out = (
        b.tensor(kind, COUNT, name) for kind, name in (("output", "g"), ("input", "u"), ("input", "o"))
    )
    b.kernel("silu_multiply")
    op = b.op(
        "triton.model:silu_multiply",
        read(up, "declared"),
        read(out, "declared"),
        write(gate, False, "declared"),
    )
    module = module_row()
    rows = [launch(0, op, module["module"], [(gate, 0), (up, 0), (out, 0)], COUNT)]
    trace = save(tmp_path / "a.trace", b.trace(), rows, [module])
    with pytest.raises(
        ModelError, match=r"kernel 0 \(silu_multiply\), argument 2 .*\(o\).*\(line \d+"
    ) as caught:
        DepsStage().run(trace, tmp_path / "a.deps")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "a.deps").exists()


def test_a_must_that_the_ptx_refutes_is_refused(tmp_path: Path) -> None:
    trace = silu_trace(tmp_path / "a.trace", count=COUNT - 100)
    with pytest.raises(
        ModelError, match="declared to fill buffer 3, but its PTX for sm_90 leaves bytes unwritten"
    ):
        DepsStage().run(trace, tmp_path / "a.deps")


def test_what_the_launch_leaves_is_not_proven(tmp_path: Path) -> None:
    trace = silu_trace(tmp_path / "a.trace", count=COUNT - 100, out_must=False)
    DepsStage().run(trace, tmp_path / "a.deps")
    (written,) = [
        a for a in load_deps(tmp_path / "a.deps").accesses(0) if a.target == "sm_90" and a.mode == "write"
    ]
    assert written.boxes == (Box.interval(0, 2 * (COUNT - 100)),)


def test_an_op_without_a_description_touches_whole_buffers(tmp_path: Path) -> None:
    b = Builder()
    x, y = b.tensor("input", 64, "x"), b.tensor("output", 64, "y")
    half = b.tensor("activation", 32, buffer=b.tensors[y].buffer)
    b.kernel()
    b.op("aten.relu.out", read(x), write(y))
    b.kernel()
    b.op("mine.odd.default", read(half, "conservative"), write(half, True, "conservative"))
    b.kernel()
    b.op("aten.neg.out", read(y), write(x))
    trace = save(tmp_path / "a.trace", b.trace())
    facts = DepsStage().run(trace, tmp_path / "a.deps")
    deps = load_deps(tmp_path / "a.deps")
    odd = [a for a in deps.accesses(0) if a.kernel == 1]
    assert [(a.mode, a.must, a.boxes, a.precision) for a in odd] == [
        ("read", False, None, "fallback"),
        ("write", False, None, "fallback"),
    ]
    assert deps.chains(0) == ((0, 1),)
    raw = {(e.source, e.destination): (e.boxes, e.must) for e in deps.edges(0) if e.hazard == "RAW"}
    everything = (Box.interval(0, 128),)
    assert raw == {(0, 1): (everything, True), (0, 2): (everything, False), (1, 2): (None, False)}
    assert any("mine.odd.default" in row[2] for t in facts.tables if t.title == "not exact" for row in t.rows)


def test_an_unknown_target_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    trace = silu_trace(tmp_path / "a.trace")
    with pytest.raises(InputError, match=r"no target sm_70 \(it has ops, sm_90\)"):
        DepsStage(("sm_70",)).run(trace, tmp_path / "a.deps")
    assert not (tmp_path / "a.deps").exists()


def test_a_written_module_variable_is_refused_and_a_read_one_listed(tmp_path: Path) -> None:
    def with_variable(access: str) -> Path:
        """The launch's kernel, which begins with an access to a variable of its module."""
        trace = silu_trace(tmp_path / "a.trace")
        text = module_row()["text"].replace(
            ".visible .entry", ".global .align 4 .u32 counter;\n.visible .entry"
        )
        at = text.index("ld.param")
        module = {**module_row(), "text": f"{text[:at]}{access}\n{text[at:]}"}
        rows = [launch(2, 3, module["module"], [(1, 0), (2, 0), (3, 0)], COUNT)]
        return save(trace, load_trace(trace), rows, [module])

    with pytest.raises(ModelError, match=r"writes the module variable counter \(line \d+") as caught:
        DepsStage().run(with_variable("st.global.u32 [counter], 1;"), tmp_path / "a.deps")
    assert "\n" not in str(caught.value)
    facts = DepsStage().run(with_variable("ld.global.u32 %r1, [counter];"), tmp_path / "a.deps")
    assert any("module variable counter is read" in str(row) for t in facts.tables for row in t.rows)


def test_text_that_is_not_ptx_is_refused_with_its_place(tmp_path: Path) -> None:
    trace = silu_trace(tmp_path / "a.trace")
    module = {**module_row(), "text": ".version 8.7\n.target sm_90\nwhat is this"}
    rows = [launch(2, 3, module["module"], [(1, 0), (2, 0), (3, 0)], COUNT)]
    save(trace, load_trace(trace), rows, [module])
    with pytest.raises(PtxSyntaxError, match="sm_90 module"):
        DepsStage().run(trace, tmp_path / "a.deps")


def test_a_launch_without_ptx_keeps_the_schema(tmp_path: Path) -> None:
    trace = silu_trace(tmp_path / "a.trace")
    module = {**module_row(), "language": "cubin", "text": ""}
    rows = [launch(2, 3, module["module"], [(1, 0), (2, 0), (3, 0)], COUNT)]
    save(trace, load_trace(trace), rows, [module])
    facts = DepsStage().run(trace, tmp_path / "a.deps")
    deps = load_deps(tmp_path / "a.deps")
    assert {a.target for a in deps.accesses(0)} == {"ops"}
    assert any(
        row[0] == "sm_90" and "no PTX" in row[2] for t in facts.tables for row in t.rows if len(row) == 3
    )


def test_launches_of_ops_elsewhere_are_refused(tmp_path: Path) -> None:
    trace = silu_trace(tmp_path / "a.trace")
    module = module_row()
    rows = [launch(2, 0, module["module"], [(1, 0), (2, 0), (3, 0)], COUNT)]
    save(trace, load_trace(trace), rows, [module])
    with pytest.raises(ArtifactError, match="launches of ops"):
        DepsStage().run(trace, tmp_path / "a.deps")


def test_artifacts_of_different_programs_do_not_mix(tmp_path: Path) -> None:
    one, two = silu_trace(tmp_path / "a.trace"), silu_trace(tmp_path / "b.trace", out_must=False)
    DepsStage().run(one, tmp_path / "a.deps")
    deps = load_deps(tmp_path / "a.deps")
    check_same_program({"a.trace": load_trace(one).digest, "a.deps": deps.program_digest})
    with pytest.raises(OriginError, match=r"b\.trace and a\.deps"):
        check_same_program({"b.trace": load_trace(two).digest, "a.deps": deps.program_digest})


def test_a_launch_that_nobody_declared_is_known_by_its_ptx(tmp_path: Path) -> None:
    """Two such launches share a buffer: by ops alone they must share a device, and so in the union."""
    b = Builder()
    tensors = [
        b.tensor(kind, COUNT, name) for kind, name in (("input", "g"), ("input", "u"), ("output", "o"))
    ]
    module, rows = module_row(), []
    for kernel in range(2):
        b.kernel("silu_multiply")
        accesses = [made(t, evidence="conservative") for t in tensors for made in (read, write)]
        op = b.op("triton.model:silu_multiply", *accesses)
        rows.append(launch(kernel, op, module["module"], [(t, 0) for t in tensors], COUNT))
    trace = save(tmp_path / "a.trace", b.trace(), rows, [module])
    DepsStage().run(trace, tmp_path / "a.deps")
    edges = read_deps(tmp_path / "a.deps").table("edges").to_pylist()
    assert [e["hazard"] for e in edges if e["target"] == "sm_90"] == ["WAW"]
    assert {e["hazard"] for e in edges if e["target"] == "ops"} == {"RAW", "WAR", "WAW"}
    chains = read_deps(tmp_path / "a.deps").table("chains").to_pylist()
    assert {row["target"] for row in chains} == {"ops"}
    assert load_deps(tmp_path / "a.deps").chains(0) == ((0, 1),)


def test_an_address_that_depends_on_data_is_bounded_by_its_buffer_and_says_why(tmp_path: Path) -> None:
    b = Builder()
    table, tokens = b.tensor("weight", 512 * 10, "table"), b.tensor("input", 4 * 3, "tokens")
    out = b.tensor("output", 512 * 3, "out")
    b.kernel("embedding")
    op = b.op(
        "triton.model:embedding",
        read(table, "declared"),
        read(tokens, "declared"),
        write(out, True, "declared"),
    )
    module = module_row("embedding")
    rows = [launch(0, op, module["module"], [(t, 0) for t in (table, tokens, out)], 512, "embedding", 3)]
    trace = save(tmp_path / "a.trace", b.trace(), rows, [module])
    facts = DepsStage().run(trace, tmp_path / "a.deps")
    found = {a.buffer: a for a in load_deps(tmp_path / "a.deps").accesses(0) if a.target == "sm_90"}
    assert (found[table].boxes, found[table].precision) == (None, "bounded")
    assert module["module"][:19] in found[table].detail and "line " in found[table].detail
    assert (found[out].must, found[out].boxes) == (True, (Box.interval(0, 2 * 512 * 3),))
    (reasons,) = [t.rows for t in facts.tables if t.title == "not exact"]
    assert any(row[:2] == ("sm_90", 1) and found[table].detail in row[2] for row in reasons)


def test_launches_that_name_no_op_stand_for_the_whole_kernel(tmp_path: Path) -> None:
    trace = silu_trace(tmp_path / "a.trace")
    module = module_row()
    rows = [launch(2, None, module["module"], [(1, 0), (2, 0), (3, 0)], COUNT)]
    save(trace, load_trace(trace), rows, [module])
    DepsStage().run(trace, tmp_path / "a.deps")
    found = [
        (a.buffer, a.mode, a.evidence)
        for a in load_deps(tmp_path / "a.deps").accesses(0)
        if a.target == "sm_90"
    ]
    assert found == [(1, "read", "ptx"), (2, "read", "ptx"), (3, "write", "ptx")]


def test_a_view_inside_a_buffer_moves_the_boxes(tmp_path: Path) -> None:
    b = Builder()
    both = b.tensor("input", 2 * COUNT, "both")
    gate = b.tensor("activation", COUNT, buffer=both)
    up = b.tensor("activation", COUNT, buffer=both, offset=COUNT)
    out = b.tensor("output", COUNT, "out")
    b.kernel("silu_multiply")
    op = b.op(
        "triton.model:silu_multiply",
        read(gate, "declared"),
        read(up, "declared"),
        write(out, True, "declared"),
    )
    module, buffers = module_row(), [b.tensors[t].buffer for t in (gate, up, out)]
    pointers = list(zip(buffers, (0, 2 * COUNT, 0), strict=True))
    trace = save(
        tmp_path / "a.trace", b.trace(), [launch(0, op, module["module"], pointers, COUNT)], [module]
    )
    DepsStage().run(trace, tmp_path / "a.deps")
    found = [a for a in load_deps(tmp_path / "a.deps").accesses(0) if a.target == "sm_90"]
    assert [(a.buffer, a.boxes) for a in found] == [
        (buffers[0], (Box.interval(0, 4 * COUNT),)),
        (buffers[2], (Box.interval(0, 2 * COUNT),)),
    ]


@pytest.mark.parametrize("stored", [True, False])
def test_addresses_are_looked_up_in_stored_content_and_that_drives_nothing(
    tmp_path: Path, stored: bool
) -> None:
    """An embedding of constant tokens 3, 0, 7 in a table of 10 rows of 1,024 bytes."""
    b = Builder()
    table, tokens = b.tensor("weight", 512 * 10, "table"), b.tensor("constant", 4 * 3, "tokens")
    out = b.tensor("output", 512 * 3, "out")
    b.kernel("embedding")
    op = b.op(
        "triton.model:embedding",
        read(table, "declared"),
        read(tokens, "declared"),
        write(out, True, "declared"),
    )
    module = module_row("embedding")
    rows = [launch(0, op, module["module"], [(t, 0) for t in (table, tokens, out)], 512, "embedding", 3)]
    constants = {f"buffer.{tokens}": np.array([3, 0, 7], dtype="<i8").view(np.uint8)} if stored else {}
    trace = replace(b.trace(), constants=safetensors.numpy.save(constants))
    save(tmp_path / "a.trace", trace, rows, [module])
    plain = DepsStage().run(tmp_path / "a.trace", tmp_path / "plain.deps")
    facts = DepsStage(resolve=True).run(tmp_path / "a.trace", tmp_path / "a.deps")
    assert (facts.values["resolved"], facts.values["not_resolved"]) == ((1, 0) if stored else (0, 1))
    assert "resolved" not in plain.values
    mine = [a for a in load_deps(tmp_path / "a.deps").accesses(0) if a.target == "sm_90"]
    found = {a.valid_for: a for a in mine if a.buffer == table}
    assert (found["shapes"].boxes, found["shapes"].precision) == (None, "bounded")
    if stored:
        content = found["content"].boxes
        assert content is not None
        touched = {low // 1024 for box in content for low, _ in box.intervals()}
        assert touched == {0, 3, 7} and sum(box.bytes for box in content) == 3 * 1024
    edges = [read_deps(tmp_path / name).table("edges") for name in ("a.deps", "plain.deps")]
    assert edges[0].equals(edges[1])


def test_a_result_that_the_gpu_refutes_is_not_written(tmp_path: Path) -> None:
    def validator(refuted: int) -> DepsStage:
        values = {"kernels_refuted": refuted, "kernels_tested": 4}
        table = FactTable("poison", ("kernel",), ((2,),))
        return DepsStage(validator=lambda trace, bundle, target: Facts(target, values, (table,)))

    trace = silu_trace(tmp_path / "a.trace")
    with pytest.raises(VerificationError, match="1 of 4 kernels of sm_90 touch other bytes"):
        validator(1).run(trace, tmp_path / "a.deps")
    assert not (tmp_path / "a.deps").exists()
    facts = validator(0).run(trace, tmp_path / "a.deps")
    assert [t.rows for t in facts.tables if t.title == "poison, sm_90"] == [((2,),)]
    with pytest.raises(InputError, match="no captured target to validate"):
        DepsStage(targets=("ops",), validator=validator(0).validator).run(trace, tmp_path / "b.deps")
