"""TOML documents: round trips, hand edits, and errors that name the offending field."""

import json

import pytest
from hypothesis import given, settings

from tessera_formats.cluster import CLUSTER, cluster_digest, read_cluster
from tessera_formats.document import StaleChecksumWarning, encode_document, read_document, write_document
from tessera_formats.errors import ArtifactError, NewerVersionError
from tessera_formats.plan import PLAN, PLAN_VERSIONS
from tessera_formats.workload import WORKLOAD, read_workload
from tests.formats.samples import records

CLUSTER_TEXT = """
[[device]]
name = "a"
type = "l40s"
[[device]]
name = "b"
type = "l4"
count = 2
[[link]]
between = ["a", "b"]
gbit_per_s = 200
latency_us = 5
"""


@pytest.mark.parametrize("schema", [PLAN, CLUSTER, WORKLOAD], ids=lambda s: s.kind)
def test_documents_come_back_as_written(tmp_path_factory, schema):
    @given(content=records(schema.record))
    @settings(max_examples=25, deadline=None)
    def check(content):
        path = tmp_path_factory.mktemp("d") / "x.toml"
        write_document(path, schema, content)
        assert read_document(path, {1: schema}) == json.loads(json.dumps(content))
        assert path.read_bytes() == encode_document(schema, content, "x")

    check()


def test_a_cluster_by_hand_needs_no_kind(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(CLUSTER_TEXT)
    cluster = read_cluster(path)
    assert [device["name"] for device in cluster["device"]] == ["a", "b"]
    path.write_text(CLUSTER_TEXT + "# a comment\n")
    assert cluster_digest(read_cluster(path)) == cluster_digest(cluster)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("gbit_per_s = 200", "gbit_per_s = -1", "link[0].gbit_per_s is -1, must be at least 0.001"),
        ("gbit_per_s = 200", "gbit_per_s = nan", "link[0].gbit_per_s is nan, must be a finite number"),
        ("gbit_per_s = 200", 'gbit_per_s = "fast"', "link[0].gbit_per_s is 'fast', expected a number"),
        ("latency_us = 5", "", "link[0].latency_us is missing (time of an empty transfer)"),
        ("latency_us = 5", "latency_us = true", "link[0].latency_us is True, expected a number"),
        ('name = "a"', 'nam = "a"', "device[0].nam is not known here"),
        ("count = 2", "count = 1.5", "device[1].count is 1.5, expected an integer"),
        ('type = "l40s"', "type = 3", "device[0].type is 3, expected a string"),
        ("count = 2", "count = 0", "device[1].count is 0, must be at least 1"),
        ("count = 2", "memory_gb = 1e308", "device[1].memory_gb is 1e+308, must be at most 1e+06"),
        ("[[link]]", "[link]", "link is not a list of tables"),
        ("gbit_per_s = 200", "gbit_per_s = ", "is no valid TOML"),
    ],
)
def test_a_bad_field_is_named(tmp_path, old, new, said):
    path = tmp_path / "c.toml"
    path.write_text(CLUSTER_TEXT.replace(old, new))
    with pytest.raises(ArtifactError) as problem:
        read_cluster(path)
    assert said in str(problem.value)
    assert str(path) in str(problem.value)


def test_an_edited_document_loads_with_a_warning(tmp_path):
    path = tmp_path / "c.toml"
    (tmp_path / "by-hand.toml").write_text(CLUSTER_TEXT)
    write_document(path, CLUSTER, read_cluster(tmp_path / "by-hand.toml"))
    path.write_text(path.read_text().replace("latency_us = 5", "latency_us = 6"))
    with pytest.warns(StaleChecksumWarning, match="was edited"):
        assert read_cluster(path)["link"][0]["latency_us"] == 6


def test_kind_and_version_are_checked(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text('kind = "workload"\nversion = 1\n')
    with pytest.raises(ArtifactError, match="is of kind workload, expected a plan"):
        read_document(path, PLAN_VERSIONS)
    path.write_text("seed = 1\n")
    with pytest.raises(ArtifactError, match="does not say its kind"):
        read_document(path, PLAN_VERSIONS)
    path.write_text('kind = "workload"\nversion = 7\n')
    with pytest.raises(NewerVersionError, match="version 7 is newer"):
        read_workload(path)
    path.write_text('kind = "workload"\nversion = "1"\n')
    with pytest.raises(ArtifactError, match="version is '1'"):
        read_workload(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArtifactError, match="is no text"):
        read_workload(path)
