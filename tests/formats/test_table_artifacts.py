"""Single-file artifacts: what is written is read back; what is damaged is refused by name in one line."""

import json
import math
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_formats.artifact import encode_table_artifact, read_table_artifact, write_table_artifact
from tessera_formats.errors import ArtifactError, NewerVersionError
from tessera_formats.profile import PROFILE, PROFILE_VERSIONS, TIMES, read_profile, write_profile
from tessera_formats.table import checked, content_checksum
from tests.formats.samples import records, tables

ROW = {
    "signature": "s",
    "part": "whole",
    "device_type": "l40s",
    "condition": "alone",
    "cache": "sequence",
    "median_us": 2.0,
    "p10_us": 1.0,
    "p90_us": 3.0,
    "low_us": 1.5,
    "high_us": 2.5,
    "samples": 3,
    "flops": 10,
    "bytes": 20,
    "source": "measured",
    "load": "",
    "dtype": "bfloat16",
    "hardware": "",
    "dated": "2026-12-01",
    "table": "",
    "distance": 0.0,
    "detail": "",
}
HEADER = {"program_digest": "sha256:0", "links": [], "devices": []}


def one_line(problem: pytest.ExceptionInfo[Exception]) -> str:
    text = str(problem.value)
    assert "\n" not in text
    return text


@given(table=tables(TIMES), header=records(PROFILE.header))
@settings(max_examples=40, deadline=None)
def test_profiles_come_back_as_written(tmp_path_factory, table, header):
    path = tmp_path_factory.mktemp("p") / "x.profile.arrow"
    write_profile(path, header, table)
    read = read_profile(path)
    assert read.header == json.loads(json.dumps(header))
    assert read.table.equals(table)
    assert path.read_bytes() == encode_table_artifact(PROFILE, header, table, "x")


@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(max_examples=300, deadline=None)
def test_a_flipped_bit_is_refused_or_changes_nothing(tmp_path_factory, position, bit):
    path = tmp_path_factory.mktemp("p") / "x.profile.arrow"
    table = TIMES.build([ROW, {**ROW, "signature": "t"}])
    write_profile(path, HEADER, table)
    content = bytearray(path.read_bytes())
    content[int(position * len(content))] ^= 1 << bit
    path.write_bytes(content)
    try:
        read = read_profile(path)
    except ArtifactError as problem:
        assert str(path) in str(problem)
        assert "\n" not in str(problem)
    else:  # padding, or a field of the file that carries no content
        assert read.header == HEADER
        assert read.table.equals(table)


@given(keep=st.floats(0, 1, exclude_max=True))
@settings(max_examples=60, deadline=None)
def test_a_truncated_file_is_refused(tmp_path_factory, keep):
    path = tmp_path_factory.mktemp("p") / "x.profile.arrow"
    write_profile(path, HEADER, TIMES.build([ROW]))
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    with pytest.raises(ArtifactError, match=r"x\.profile\.arrow") as problem:
        read_profile(path)
    one_line(problem)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"median_us": -1.0}, "column median_us: row 0 is -1.0, must be at least 0"),
        ({"median_us": math.nan}, "column median_us: row 0 is nan, must be a finite number"),
        ({"high_us": math.inf}, "column high_us: row 0 is inf, must be a finite number"),
        ({"samples": -1}, "column samples: row 0 is -1, must be at least 0"),
        ({"source": "guessed"}, "must be one of measured, silicon, modelled"),
        ({"signature": None}, "column signature: row 0 has no value"),
    ],
)
def test_bad_values_are_refused_and_the_old_file_stays(tmp_path, change, said):
    path = tmp_path / "x.profile.arrow"
    write_profile(path, HEADER, TIMES.build([ROW]))
    before = path.read_bytes()
    with pytest.raises(ArtifactError) as problem:
        write_profile(path, HEADER, TIMES.build([{**ROW, **change}]))
    assert said in one_line(problem)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_repeated_key_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match=r"signature=s.* more than once"):
        write_profile(tmp_path / "x", HEADER, TIMES.build([ROW, ROW]))


def test_missing_unknown_and_mistyped_columns_are_named():
    table = TIMES.build([ROW])
    with pytest.raises(ArtifactError, match="lacks detail"):
        checked(table.drop_columns(["detail"]), TIMES, "x")
    with pytest.raises(ArtifactError, match="has unknown extra"):
        checked(table.append_column("extra", pa.array([1])), TIMES, "x")
    index = table.column_names.index("samples")
    with pytest.raises(ArtifactError, match="column samples: type int32, expected int64"):
        checked(table.set_column(index, "samples", pa.array([1], pa.int32())), TIMES, "x")


def test_rows_with_wrong_keys_are_our_own_mistake():
    with pytest.raises(KeyError):
        TIMES.build([{**ROW, "surplus": 1}])


def test_newer_version_wrong_kind_missing_and_foreign_files(tmp_path):
    path = tmp_path / "x.arrow"
    with pytest.raises(ArtifactError, match="does not exist"):
        read_profile(path)
    newer = {2: type(PROFILE)(kind="profile", version=2, header=PROFILE.header, table=TIMES)}
    write_table_artifact(path, newer[2], HEADER, TIMES.build([ROW]))
    with pytest.raises(NewerVersionError, match="version 2 is newer than this toolchain reads"):
        read_profile(path)
    path.unlink()
    other = {1: type(PROFILE)(kind="other", version=1, header=PROFILE.header, table=TIMES)}
    write_table_artifact(path, other[1], HEADER, TIMES.build([ROW]))
    with pytest.raises(ArtifactError, match="is of kind other, expected a profile"):
        read_table_artifact(path, PROFILE_VERSIONS)
    with pa.ipc.new_file(str(path), TIMES.arrow()) as writer:
        writer.write_table(TIMES.build([ROW]))
    with pytest.raises(ArtifactError, match="no artifact of this toolchain"):
        read_profile(path)
    path.write_text("not arrow")
    with pytest.raises(ArtifactError, match="no readable profile"):
        read_profile(path)
    with pytest.raises(ArtifactError, match="is a folder"):
        read_profile(tmp_path)


@given(table=tables(TIMES), cut=st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_the_checksum_is_of_values_not_of_chunks(table, cut):
    cut = min(cut, table.num_rows)
    parts = pa.concat_tables([table.slice(0, cut), table.slice(cut)])
    assert content_checksum(parts) == content_checksum(table)


def test_the_checksum_tells_values_nulls_and_list_borders_apart():
    kind = pa.list_(pa.int64())
    cases = [[[1], [2]], [[1, 2], []], [[], [1, 2]], [None, [1, 2]], [[1], [3]], [[1], [2], []]]
    sums = {content_checksum(pa.table({"a": pa.array(case, kind)})) for case in cases}
    texts = [["ab", "c"], ["a", "bc"], ["", "abc"], [None, "abc"]]
    sums |= {content_checksum(pa.table({"a": pa.array(case)})) for case in texts}
    assert len(sums) == len(cases) + len(texts)


def test_a_file_of_another_kind_is_left_alone(tmp_path):
    precious = tmp_path / "notes.txt"
    for content in ("precious", 'kind = "plan"\n'):
        precious.write_text(content)
        with pytest.raises(ArtifactError, match="told as a profile; it is left alone"):
            write_profile(precious, HEADER, TIMES.build([ROW]))
        assert precious.read_text() == content
    precious.write_text("")
    write_profile(precious, HEADER, TIMES.build([ROW]))
    precious.write_bytes(precious.read_bytes()[:900])
    write_profile(precious, HEADER, TIMES.build([ROW]))
    assert read_profile(precious).table.num_rows == 1


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.profile.arrow"
    write_profile(path, HEADER, TIMES.build([ROW]))
    before = path.read_bytes()

    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tessera_formats.files.os.fsync", full)
    with pytest.raises(ArtifactError, match=r"no space left for .* bytes; nothing was changed") as problem:
        write_profile(path, HEADER, TIMES.build([{**ROW, "samples": 9}]))
    one_line(problem)
    assert path.read_bytes() == before
    assert [p.name for p in Path(tmp_path).iterdir()] == [path.name]
