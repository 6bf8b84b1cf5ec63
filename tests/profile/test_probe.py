"""The cluster file of machines that are made up: what is listed, which links, and that it can be planned with."""

from pathlib import Path
from typing import Any

import pytest
import tomli
from hypothesis import given
from hypothesis import strategies as st

from tessera_core.devices.here import FoundGpu
from tessera_core.plan.cluster import Cluster, load_cluster
from tessera_core.profile import probe, probe_links
from tessera_core.profile.probe import ProbeStage, parse_slices
from tessera_core.profile.times import LinkRow
from tessera_formats.cluster import read_cluster
from tessera_formats.errors import DeviceLostError, InputError

H200 = FoundGpu(index=0, name="NVIDIA H200", free_bytes=140_000_000_000, multiprocessors=132)
L4 = FoundGpu(index=1, name="NVIDIA L4", free_bytes=23_000_000_000, multiprocessors=60)
UNKNOWN = FoundGpu(index=2, name="NVIDIA Whatever", free_bytes=1_000_000_000, multiprocessors=8)


def link(transport: str, gbit_per_s: float) -> LinkRow:
    return LinkRow(
        source="a", destination="b", latency_us=3.0, gbit_per_s=gbit_per_s, send_us=2.0, receive_us=1.0,
        occupies_sender=transport == "shared-memory", samples=9, residual=0.02, origin="measured",
        transport=transport, detail="4 KiB 5.0 us (+0%)",
    )  # fmt: skip


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``machine(gpus, cpus)``: what is here from now on; every measurement is told to the list that it returns."""

    def make(gpus: tuple[FoundGpu, ...], cpus: int) -> list[tuple[Any, ...]]:
        asked: list[tuple[Any, ...]] = []
        monkeypatch.setattr(probe, "found_gpus", lambda: gpus)
        monkeypatch.setattr(probe, "has_nvidia_driver", lambda: bool(gpus))
        monkeypatch.setattr(probe, "usable_cpus", lambda: tuple(range(cpus)))
        monkeypatch.setattr(probe, "available_memory_bytes", lambda: 20_000_000_000)

        def measuring(name: str, transport: str, gbit_per_s: float) -> None:
            def measure(*arguments: Any) -> LinkRow:
                asked.append((transport, *arguments))
                return link(transport, gbit_per_s)

            monkeypatch.setattr(probe_links, name, measure)

        measuring("_shared_memory", "shared-memory", 80.0)
        measuring("_gloo", "gloo", 20.0)
        measuring("_messages_between_gpus", "nccl", 300.0)
        measuring("_copy", "pinned-host", 400.0)
        return asked

    return make


def planned(path: Path) -> Cluster:
    """As partition reads it: without any link of a profile, and of the catalogue's memory nothing is needed."""
    return load_cluster(path, lambda source, destination: None, lambda kind: None)


def test_workers_of_a_machine_without_gpu(machine: Any, tmp_path: Path) -> None:
    asked = machine((), 3)
    facts = ProbeStage(seconds=4.0).run(tmp_path / "c.toml").as_json()
    cluster = planned(tmp_path / "c.toml")
    assert [(d.name, d.type) for d in cluster.devices] == [(f"cpu{k}", "cpu-1thread") for k in range(3)]
    assert cluster.domains == {"host0": 18_000_000_000}  # shared, not added up
    found = cluster.links["cpu2", "cpu1"]
    assert (found.gbit_per_s, found.latency_us, found.send_us, found.receive_us, found.occupies_sender) == (
        80.0, 3.0, 2.0, 1.0, True,
    )  # fmt: skip
    assert sum(arguments[-1] for arguments in asked) == pytest.approx(4.0)
    assert [(row["transport"], row["stated"]) for row in facts["links"]] == [
        ("shared-memory", True),
        ("gloo", False),
    ]
    text = " ".join((tmp_path / "c.toml").read_text().replace("\n#", "").split())
    assert "cpu0 to cpu1 by gloo: gloo" in text and "workers of one host use shared memory" in text


def test_gpus_of_a_machine_and_what_the_catalogue_lacks(machine: Any, tmp_path: Path) -> None:
    machine((H200, L4, UNKNOWN), 2)
    facts = ProbeStage().run(tmp_path / "c.toml").as_json()
    cluster = planned(tmp_path / "c.toml")
    assert [(d.name, d.type, d.capacity_bytes) for d in cluster.devices] == [
        ("gpu0", "h200-sxm", 126_000_000_000),
        ("gpu1", "l4", 20_700_000_000),
    ]
    (line,) = [row["what"] for row in facts["left out"]]
    assert "cuda:2 is an NVIDIA Whatever" in line
    assert "NVIDIA Whatever" in (tmp_path / "c.toml").read_text()
    assert [row["transport"] for row in facts["links"] if not row["stated"]] == ["nccl"]


def test_gpus_that_pytorch_cannot_use_are_told(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine((), 2)
    monkeypatch.setattr(probe, "has_nvidia_driver", lambda: True)
    facts = ProbeStage().run(tmp_path / "c.toml").as_json()
    assert ["PyTorch can use none" in row["what"] for row in facts["left out"]] == [True]


def test_slices_are_devices_of_one_memory(machine: Any, tmp_path: Path) -> None:
    asked = machine((H200,), 2)
    ProbeStage(slices=(96, 36), cpus=1).run(tmp_path / "c.toml")
    cluster = planned(tmp_path / "c.toml")
    assert [(d.name, d.type, d.memory_domain) for d in cluster.devices] == [
        ("gpu0-0", "h200-sxm/sm=96", "host0-gpu0"),
        ("gpu0-1", "h200-sxm/sm=36", "host0-gpu0"),
        ("cpu0", "cpu-1thread", "host0"),
    ]
    assert cluster.domains["host0-gpu0"] == 126_000_000_000
    assert (tmp_path / "c.toml").read_text().count("cuda:0: NVIDIA H200, 132 multiprocessors") == 1
    hardware = [row["hardware"] for row in read_cluster(tmp_path / "c.toml")["device"]]
    assert hardware == ["cuda:0/sm=96+36#0", "cuda:0/sm=96+36#1", "cpu:0"]
    assert [(row[1], row[2]) for row in asked] == [("cuda:0", "cuda:0"), ("cuda:0", "cpu"), ("cpu", "cuda:0")]


def test_a_link_that_fails_is_left_out_and_the_rest_stands(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine((H200,), 2)

    def lost(*arguments: Any) -> LinkRow:
        raise DeviceLostError("the worker on cpu:1 was lost")

    monkeypatch.setattr(probe_links, "_shared_memory", lost)
    facts = ProbeStage(cpus=2).run(tmp_path / "c.toml").as_json()
    assert any("was lost" in row["what"] for row in facts["left out"])
    rows = read_cluster(tmp_path / "c.toml")["link"]
    assert {(row["from"], row["to"]) for row in rows} == {("gpu0", "cpu-1thread"), ("cpu-1thread", "gpu0")}


def test_without_measuring_no_link_is_stated(machine: Any, tmp_path: Path) -> None:
    asked = machine((), 2)
    facts = ProbeStage(measure=False).run(tmp_path / "c.toml").as_json()
    assert asked == [] and "links" not in facts
    assert "link" not in read_cluster(tmp_path / "c.toml")
    with pytest.raises(InputError, match=r"no link from cpu0"):
        planned(tmp_path / "c.toml")


@pytest.mark.parametrize(
    ("gpus", "options", "message"),
    [
        ((), {"cpus": 0}, r"finds no device to list \(no GPU is here"),
        ((), {"host": ""}, r"--host '': is no name"),
        ((), {"host": "a\nb"}, r"--host 'a\\nb': is no name"),
        ((), {"cpus": 9}, r"--cpus 9: this process may use 2"),
        ((), {"slices": (96, 36)}, r"--slices 96\+36: there is no GPU"),
        ((H200,), {"slices": (96, 64)}, r"asks for 160 multiprocessors, cuda:0 has 132"),
        ((UNKNOWN,), {}, r"finds no device to list \(cuda:2 is an NVIDIA Whatever"),
    ],
)
def test_what_cannot_be_asked_for(
    machine: Any, tmp_path: Path, gpus: tuple[FoundGpu, ...], options: dict[str, Any], message: str
) -> None:
    machine(gpus, 2)
    (tmp_path / "c.toml").write_text(before := 'kind = "cluster"\nversion = 1\n')
    with pytest.raises(InputError, match=message):
        ProbeStage(**options).run(tmp_path / "c.toml")
    assert (tmp_path / "c.toml").read_text() == before


@given(st.lists(st.integers(1, 999), min_size=1, max_size=4))
def test_slices_are_read_as_they_are_written(counts: list[int]) -> None:
    assert parse_slices("+".join(map(str, counts))) == tuple(counts)


@pytest.mark.parametrize("text", ["", "96+", "96,36", "0", "96+0", "-1", "9.5", "²"])
def test_slices_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"write it as 96\+36"):
        parse_slices(text)


def test_the_file_is_one_that_people_edit(machine: Any, tmp_path: Path) -> None:
    """A table each, comments above, no line that runs away; probing again replaces it, other files stay."""
    machine((H200, L4), 2)
    path = tmp_path / "c.toml"
    ProbeStage(cpus=2, host="left").run(path)
    text = path.read_text()
    assert max(map(len, text.splitlines())) <= 110
    assert text.count("[[device]]") == 4 and text.count("[[link]]") == len(tomli.loads(text)["link"])
    assert {row["host"] for row in tomli.loads(text)["device"]} == {"left"}
    ProbeStage(cpus=2, host="right").run(path)
    assert 'host = "right"' in path.read_text()
