"""Bundles: a reader sees the old one or the new one, damage is refused by name, nothing foreign is touched."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow as pa
import pytest
import tomli
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tessera_formats.adapt import ADAPT, ADAPT_VERSIONS
from tessera_formats.bundle import BundleSchema, read_bundle, write_bundle
from tessera_formats.deps import DEPS, DEPS_VERSIONS, read_deps, write_deps
from tessera_formats.errors import ArtifactError, NewerVersionError, OriginError
from tessera_formats.run import RUN, RUN_VERSIONS
from tessera_formats.trace import TRACE, check_same_program, program_digest, read_trace, write_trace
from tests.formats.samples import records, tables

ROOT = Path(__file__).parents[2]
DEPS_INFO = {"program_digest": "sha256:0", "targets": ["ops"], "modules": [], "unknown_opcodes": []}


def empty(schema: BundleSchema) -> dict[str, pa.Table]:
    return {table.name: table.empty() for table in schema.tables}


def edge(destination: int) -> dict[str, object]:
    return {
        "target": "ops",
        "program": 0,
        "source": 0,
        "destination": destination,
        "buffer": 3,
        "hazard": "RAW",
        "boxes": [{"start": 0, "counts": [2], "strides": [8], "run": 4}],
        "must": True,
        "evidence": "schema",
    }


def write_sample(path: Path, edges: int = 2) -> None:
    rows = DEPS.table("edges").build([edge(i) for i in range(1, edges + 1)])
    write_deps(path, DEPS_INFO, {**empty(DEPS), "edges": rows})


@pytest.mark.parametrize(
    ("schema", "versions"),
    [(DEPS, DEPS_VERSIONS), (RUN, RUN_VERSIONS), (ADAPT, ADAPT_VERSIONS)],
    ids=lambda s: getattr(s, "kind", ""),
)
def test_bundles_come_back_as_written(tmp_path_factory, schema, versions):
    content = st.fixed_dictionaries({table.name: tables(table) for table in schema.tables})

    @given(content=content, info=records(schema.info))
    @settings(
        max_examples=15,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    def check(content, info):
        path = tmp_path_factory.mktemp("b") / "x"
        write_bundle(path, schema, info=info, tables=content, files=dict.fromkeys(schema.files, b"raw"))
        bundle = read_bundle(path, versions)
        bundle.check()
        for name, table in content.items():
            assert bundle.table(name).equals(table)
        assert all(bundle.file(name) == b"raw" for name in schema.files)

    check()


def test_equal_content_gives_equal_bytes_and_digest(tmp_path):
    for name in ("a", "b"):
        write_sample(tmp_path / name)
    files = [{p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("a", "b")]
    assert files[0] == files[1]
    assert read_deps(tmp_path / "a").digest == read_deps(tmp_path / "b").digest
    write_sample(tmp_path / "b", edges=3)
    assert read_deps(tmp_path / "a").digest != read_deps(tmp_path / "b").digest


def test_replacing_leaves_no_file_of_the_old_bundle(tmp_path):
    write_sample(tmp_path / "x", edges=2)
    write_sample(tmp_path / "x", edges=3)
    assert read_deps(tmp_path / "x").table("edges").num_rows == 3
    assert len(list((tmp_path / "x").glob("edges-*"))) == 1


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_flipped_bit_anywhere_is_refused_or_changes_nothing(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("b") / "x"
    write_sample(path)
    expected = {name: read_deps(path).table(name) for name in ("accesses", "edges", "coverage")}
    victim = data.draw(st.sampled_from(sorted(path.iterdir())))
    content = bytearray(victim.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    victim.write_bytes(content)
    try:
        bundle = read_deps(path)
        bundle.check()
    except ArtifactError as problem:
        assert str(path) in str(problem)
        assert "\n" not in str(problem)
    else:
        assert all(bundle.table(name).equals(table) for name, table in expected.items())


def test_missing_truncated_and_foreign_bundles(tmp_path):
    with pytest.raises(ArtifactError, match="does not exist"):
        read_deps(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match="is a file, expected a deps folder"):
        read_deps(tmp_path / "file")
    write_sample(tmp_path / "x")
    with pytest.raises(ArtifactError, match="is of kind deps, expected a trace"):
        read_trace(tmp_path / "x")
    edges = next((tmp_path / "x").glob("edges-*"))
    edges.write_bytes(edges.read_bytes()[:100])
    with pytest.raises(ArtifactError, match=f"{edges.name}: is truncated or damaged"):
        read_deps(tmp_path / "x").table("edges")
    edges.unlink()
    with pytest.raises(ArtifactError, match="does not exist"):
        read_deps(tmp_path / "x").table("edges")
    (tmp_path / "x" / "manifest.toml").unlink()
    with pytest.raises(ArtifactError, match="its writing was interrupted"):
        read_deps(tmp_path / "x")


def test_a_newer_bundle_is_refused(tmp_path):
    newer = BundleSchema(kind="deps", version=2, info=DEPS.info, tables=DEPS.tables)
    write_bundle(tmp_path / "x", newer, info=DEPS_INFO, tables=empty(DEPS))
    with pytest.raises(NewerVersionError, match="deps version 2 is newer"):
        read_deps(tmp_path / "x")


def test_what_is_not_ours_is_left_alone(tmp_path):
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("precious")
    write_bundle(
        tmp_path / "adapt",
        ADAPT,
        info={"program_digest": "d", "plans": [], "window_us": 1.0, "threshold": 1.5, "compared": []},
        tables=empty(ADAPT),
    )
    for name in ("file", "folder", "adapt"):
        before = sorted((p.name, p.read_bytes()) for p in tmp_path.rglob("*") if p.is_file())
        with pytest.raises(ArtifactError, match="name another output"):
            write_sample(tmp_path / name)
        assert sorted((p.name, p.read_bytes()) for p in tmp_path.rglob("*") if p.is_file()) == before


def test_references_between_tables_are_checked(tmp_path):
    io = TRACE.table("io").build([{"program": 0, "role": "input", "name": "x", "tensor": 5, "feeds": None}])
    with pytest.raises(ArtifactError, match=r"table io refers to \w+=\d, which table \w+ lacks"):
        write_trace(tmp_path / "x", TRACE_INFO, {**empty(TRACE), "io": io}, b"")
    assert not (tmp_path / "x").exists()


TRACE_INFO = {
    "model": "m",
    "source": "catalogue",
    "seed": 0,
    "dtype": "float32",
    "fake": False,
    "replayable": True,
    "notes": [],
    "versions": {"torch": "1"},
}


def test_the_program_digest_ignores_versions_and_targets(tmp_path):
    write_trace(tmp_path / "a", TRACE_INFO, empty(TRACE), b"")
    launches = {f"targets/sm_90/{t.name}": t.empty() for t in TRACE.target_tables}
    write_trace(tmp_path / "b", {**TRACE_INFO, "versions": {"torch": "2"}}, {**empty(TRACE), **launches}, b"")
    first, second = read_trace(tmp_path / "a"), read_trace(tmp_path / "b")
    assert first.info["program_digest"] == second.info["program_digest"] == program_digest(empty(TRACE), b"")
    assert second.targets() == ("sm_90",)
    assert program_digest(empty(TRACE), b"x") != program_digest(empty(TRACE), b"")
    state = TRACE.table("states").build([{"name": "k", "batch_axis": 0, "sequence_axis": 2, "init": "{}"}])
    assert program_digest({**empty(TRACE), "states": state}, b"") != program_digest(empty(TRACE), b"")


def test_estimates_and_fakeness_are_not_part_of_the_program():
    buffer = {"buffer": 0, "program": None, "kind": "weight", "bytes": 4, "name": "w", "real": True}
    kernel = {
        "program": 0, "kernel": 0, "signature": "s", "name": "n", "kind": "matmul", "flops": 1, "read_bytes": 2,
        "written_bytes": 3, "state_writer": "none", "dtype": "float32", "layer": None, "group": None,
    }  # fmt: skip

    def digest(row: dict[str, object], table: str, **changes: object) -> str:
        return program_digest({**empty(TRACE), table: TRACE.table(table).build([{**row, **changes}])}, b"")

    assert digest(buffer, "buffers") == digest(buffer, "buffers", real=False)
    assert digest(buffer, "buffers") != digest(buffer, "buffers", bytes=8)
    estimates = {"flops": 9, "read_bytes": 9, "written_bytes": 9, "name": "other"}
    assert digest(kernel, "kernels") == digest(kernel, "kernels", **estimates)
    assert digest(kernel, "kernels") != digest(kernel, "kernels", signature="t")
    assert digest(kernel, "kernels") != digest(kernel, "kernels", state_writer="copy")


def test_a_damaged_bundle_can_be_written_again(tmp_path):
    for damage in (b"", b"not toml [", b'kind = "depq"\n'):
        write_sample(tmp_path / "x")
        (tmp_path / "x" / "manifest.toml").write_bytes(damage)
        write_sample(tmp_path / "x", edges=3)
        assert read_deps(tmp_path / "x").table("edges").num_rows == 3


def test_target_names_may_hold_slashes(tmp_path):
    tables = {f"targets/h200-sxm/sm=96/{t.name}": t.empty() for t in TRACE.target_tables}
    write_trace(tmp_path / "a", TRACE_INFO, {**empty(TRACE), **tables}, b"")
    trace = read_trace(tmp_path / "a")
    assert trace.targets() == ("h200-sxm/sm=96",)
    assert trace.table("targets/h200-sxm/sm=96/launches").num_rows == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"run": 0}, "a box's run must be at least 1"),
        ({"start": -1}, "a box's start must be at least 0"),
        ({"strides": []}, "a box has more counts than strides, or fewer"),
        ({"counts": [0]}, "a box's counts must be at least 1"),
    ],
)
def test_broken_boxes_are_refused(tmp_path, change, said):
    box = {"start": 0, "counts": [2], "strides": [8], "run": 4, **change}
    rows = DEPS.table("edges").build([{**edge(1), "boxes": [box]}])
    with pytest.raises(ArtifactError, match=said):
        write_deps(tmp_path / "x", DEPS_INFO, {**empty(DEPS), "edges": rows})


def test_different_programs_are_refused_and_both_named():
    assert check_same_program({"x.trace": "d", "x.deps": "d"}) == "d"
    with pytest.raises(OriginError, match=r"x\.trace and y\.deps come from different programs"):
        check_same_program({"x.trace": "d", "y.deps": "e"})


def test_a_manifest_cannot_point_outside(tmp_path):
    write_sample(tmp_path / "x")
    manifest = tmp_path / "x" / "manifest.toml"
    name = tomli.loads(manifest.read_text())["tables"]["edges"]["file"]
    manifest.write_text(manifest.read_text().replace(name, "../" + name))
    with pytest.raises(ArtifactError, match="damaged"):
        read_deps(tmp_path / "x")


def test_a_full_disk_keeps_the_old_bundle(tmp_path, monkeypatch):
    write_sample(tmp_path / "x", edges=2)
    before = {p.name: p.read_bytes() for p in (tmp_path / "x").iterdir()}
    calls = iter([None] * 1)

    def full_after_one(handle: int) -> None:
        if next(calls, "full") == "full":
            raise OSError(28, "No space left on device")
        os.fdatasync(handle)

    monkeypatch.setattr("tessera_formats.files.os.fsync", full_after_one)
    with pytest.raises(ArtifactError, match="no space left"):
        write_sample(tmp_path / "x", edges=4)
    assert {p.name: p.read_bytes() for p in (tmp_path / "x").iterdir()} == before
    with pytest.raises(ArtifactError, match="no space left"):
        write_sample(tmp_path / "new", edges=4)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("step", range(6))
def test_a_kill_at_any_write_leaves_the_old_bundle_readable(tmp_path, step):
    write_sample(tmp_path / "x", edges=2)
    script = textwrap.dedent(f"""
        import os, signal, sys
        from pathlib import Path
        import tessera_formats.files as files
        from tests.formats.test_bundles import write_sample
        real, left = os.fsync, [{step}]
        def fsync(handle):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            real(handle)
        files.os.fsync = fsync
        write_sample(Path(sys.argv[1]), edges=5)
    """)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "formats"), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "x")], env=environment, check=False)
    bundle = read_deps(tmp_path / "x")
    bundle.check()
    killed = done.returncode == -9
    assert bundle.table("edges").num_rows == (2 if killed else 5) or (
        killed and bundle.table("edges").num_rows == 5
    )
    write_sample(tmp_path / "x", edges=3)
    assert not list((tmp_path / "x").glob("*.tmp"))
    assert not list((tmp_path / "x").glob(".*.tmp"))
    assert read_deps(tmp_path / "x").table("edges").num_rows == 3
