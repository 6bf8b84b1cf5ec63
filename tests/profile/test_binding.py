"""What ``--device`` and ``--beside`` may name, on a machine that is said to have one H200."""

from dataclasses import replace
from pathlib import Path

import pytest

from tessera_core.devices import cuda
from tessera_core.devices.cpu import CpuDevice
from tessera_core.devices.cuda import CudaDevice
from tessera_core.profile.binding import beside_of, parse_binding, parse_bindings
from tessera_core.profile.catalogue import catalogue
from tessera_core.profile.measure import cuda_links
from tessera_core.profile.measure.cuda import CudaMeasured, CudaMeasurement
from tessera_core.profile.merge import load_profiles
from tessera_core.profile.stage import ProfileStage
from tessera_core.profile.times import LinkRow
from tessera_core.program.store import save_trace
from tessera_formats.errors import InputError
from tests.profile.test_times import LINK, ROW
from tests.profile.traces import tiny_trace

LARGE, SMALL = "h200-sxm/sm=96=cuda:0/sm=96+36#0", "h200-sxm/sm=36=cuda:0/sm=96+36#1"


@pytest.fixture(autouse=True)
def one_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_device_count", lambda: 1)
    monkeypatch.setattr(cuda, "reported_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(cuda, "multiprocessors_of", lambda index: 132)


def test_types_are_told_from_hardware() -> None:
    large = parse_binding(LARGE, catalogue())
    assert (large.type.name, large.hardware) == (
        "h200-sxm/sm=96",
        CudaDevice(index=0, shares=(96, 36), part=0),
    )
    assert parse_binding("h200-sxm/sm=96", catalogue()).hardware is None
    assert isinstance(parse_binding("cpu-1thread=cpu:0", catalogue()).hardware, CpuDevice)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a100-80gb=cuda:0", "write h200-sxm=cuda:0"),
        ("h200-sxm=cuda:0/sm=96+36#0", "write h200-sxm/sm=96=cuda:0/sm=96"),
        ("h200-sxm/sm=96=cuda:0", r"is a whole GPU; write h200-sxm/sm=96=cuda:0/sm=96\+36#0"),
        ("h200-sxm/dtype=float8=cuda:0", "computes in the model's dtype"),
        ("cpu-1thread=cuda:0", "CPU"),
        ("h200-sxm=cuda:3", "name cuda:0"),
        ("h200-sxm=gpu:0", "'gpu:0' is no hardware"),
        ("h200-sxm=cpu:0", "h200-sxm is a GPU"),
    ],
)
def test_what_cannot_be_bound_is_one_line(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as problem:
        parse_binding(text, catalogue())
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize(
    ("devices", "beside", "message"),
    [
        ((LARGE,), "cpu:0", "nothing of its kind is measured"),
        ((LARGE,), "cuda:0/sm=96+36#0", "is no other slice"),
        (("h200-sxm=cuda:0",), "cuda:0/sm=96+36#1", "is no other slice"),
        (("cpu-1thread=cpu:0",), "cpu:0", "is what is measured itself"),
    ],
)
def test_what_cannot_be_beside_is_one_line(devices: tuple[str, ...], beside: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_bindings(devices, beside, catalogue())


def test_slices_that_are_both_measured_are_beside_each_other() -> None:
    bindings = parse_bindings((LARGE, SMALL), "cuda:0/sm=96+36#1", catalogue())
    large, small = [binding.hardware for binding in bindings if binding.hardware is not None]
    assert beside_of(large, "cuda:0/sm=96+36#1", (large, small)) == small
    assert beside_of(small, "cuda:0/sm=96+36#1", (large, small)) == large
    assert beside_of(large, None, (large, small)) is None


def test_what_a_gpu_could_not_run_is_told_and_left_to_other_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[CudaMeasurement] = []

    def run(self: CudaMeasurement, progress: object) -> CudaMeasured:
        asked.append(self)
        rows = [
            replace(
                ROW, signature="sig-mm", device_type=self.device_type, source="measured", samples=9,
                condition=condition, hardware="NVIDIA H200",
            )
            for condition in ("alone", "beside")
        ]  # fmt: skip
        return CudaMeasured(
            rows=tuple(rows), whole={}, unmeasured={"sig-add": "no such op"}, overhead_us=4.0, hardware="H200"
        )

    def copies(source: str, destination: str, types: tuple[str, str], seconds: float) -> LinkRow:
        assert (source, destination) == ("cuda:0", "cuda:0")
        return replace(LINK, source=types[0], destination=types[1], transport="device-memory")

    monkeypatch.setattr(CudaMeasurement, "run", run)
    monkeypatch.setattr(cuda_links, "measure_copies", copies)
    save_trace(tmp_path / "x.trace", tiny_trace(fake=True))  # values are drawn on the GPU
    stage = ProfileStage(devices=(LARGE, SMALL), beside="cuda:0/sm=96+36#1", warm=True, seconds=8.0)
    facts = stage.run(tmp_path / "x.trace", tmp_path / "p.arrow").as_json()
    assert [(m.device_type, m.seconds, m.warm) for m in asked] == [
        ("h200-sxm/sm=96", 4.0, True),
        ("h200-sxm/sm=36", 4.0, True),
    ]
    assert [m.beside and m.beside.part for m in asked] == [1, 0]
    times = load_profiles([tmp_path / "p.arrow"])
    assert times.time("sig-mm", "h200-sxm/sm=36").source == "measured"
    assert times.time("sig-add", "h200-sxm/sm=36").source == "modelled"
    assert times.overhead_us("h200-sxm/sm=96") == 4.0
    assert times.link("h200-sxm/sm=36", "h200-sxm/sm=96").dated > "2026"
    assert any("sig-add is not measured: no such op" in row["what"] for row in facts["not found"])


def test_warm_caches_are_a_cuda_device_s(tmp_path: Path) -> None:
    save_trace(tmp_path / "x.trace", tiny_trace())
    with pytest.raises(InputError, match="--warm-cache: no CUDA device"):
        ProfileStage(devices=("l4",), warm=True).run(tmp_path / "x.trace", tmp_path / "p.arrow")
