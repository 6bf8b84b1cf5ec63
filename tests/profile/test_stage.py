import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tessera_core.profile import sources
from tessera_core.profile.merge import load_profiles
from tessera_core.profile.model.roofline import ModelledTime
from tessera_core.profile.stage import ProfileStage
from tessera_core.program.store import load_trace, save_trace
from tessera_formats.errors import ArtifactError, InputError, OriginError, TesseraError
from tests.profile.traces import tiny_trace

ROOT = Path(__file__).parents[2]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    save_trace(tmp_path / "x.trace", tiny_trace())
    return tmp_path / "x.trace"


@pytest.mark.parametrize("name", ["demo", "llama-tiny", "llama-3-8b-4-layers"])
def test_captures_without_recorded_times_are_modelled(name: str, tmp_path: Path) -> None:
    captured = ROOT / "fixtures" / "captures" / f"{name}.trace"
    ProfileStage(devices=("h200-sxm",), tables=False).run(captured, tmp_path / "x.profile.arrow")
    rows = [row for found in load_profiles([tmp_path / "x.profile.arrow"]).rows.values() for row in found]
    assert {row.source for row in rows} == {"modelled"}


def test_every_signature_is_modelled_once_per_type(trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "x.profile.arrow"
    facts = ProfileStage(devices=("a100-80gb", "l40s")).run(trace, output)
    times = load_profiles([output])
    assert times.program_digest == load_trace(trace).digest
    assert sorted(times.rows) == sorted(
        (signature, "whole", kind)
        for kind in ("a100-80gb", "l40s")
        for signature in ("sig-mm", "sig-add", "sig-append", "sig-count")
    )
    row = times.time("sig-mm", "l40s")
    assert (row.source, row.samples, row.low_us < row.median_us < row.high_us) == ("modelled", 0, True)
    assert times.devices["l40s"].source == "modelled"
    assert facts.values["rows"] == 8


def test_facts_add_up_an_iteration_and_say_where_times_come_from(trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "x.profile.arrow"
    facts = ProfileStage(devices=("t4",)).run(trace, output)
    times = load_profiles([output])
    (row,) = facts.as_json()["iterations"]
    kernels = load_trace(trace).programs[0].kernels
    total = sum(times.time(kernel.signature, "t4").median_us for kernel in kernels)
    assert math.isclose(row["total_us"], total, abs_tol=0.05)
    assert (row["measured_share"], row["silicon_share"], row["modelled_share"]) == (0.0, 0.0, 1.0)
    assert json.dumps(facts.as_json())


def test_equal_inputs_give_equal_bytes(trace: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        ProfileStage(devices=("h200-sxm",)).run(trace, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize(
    ("devices", "options", "message"),
    [
        ((), {}, "no device was named"),
        (("a100",), {}, "did you mean a100-80gb"),
        (("cpu-1thread=cpu:99",), {}, r"cpu:99: this process may use"),
        (("cpu-1thread=cuda:0",), {}, "cuda:0"),
        (("l4=cpu:0",), {}, "l4 is a GPU"),
        (("l4", "l4"), {}, "named 2 times"),
        (("l4",), {"beside": "cpu:0"}, "nothing is measured"),
        (("cpu-1thread=cpu:0",), {"beside": "cpu:0"}, "is what is measured itself"),
        (("cpu-1thread=cpu:0",), {"beside": "cpu:99"}, "cpu:99"),
        (("l4",), {"seconds": math.nan}, "seconds"),
        (("l4",), {"seconds": -1.0}, "seconds"),
    ],
)
def test_what_cannot_be_profiled_is_one_line_and_writes_nothing(
    trace: Path, tmp_path: Path, devices: tuple[str, ...], options: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message) as problem:
        ProfileStage(devices=devices, **options).run(trace, tmp_path / "out")  # type: ignore[arg-type]
    assert "\n" not in str(problem.value)
    assert not (tmp_path / "out").exists()


def test_a_fake_trace_can_be_modelled_but_not_measured(tmp_path: Path) -> None:
    path = tmp_path / "fake.trace"
    save_trace(path, tiny_trace(fake=True))
    ProfileStage(devices=("b200-sxm",)).run(path, tmp_path / "modelled")
    with pytest.raises(InputError, match="--fake") as problem:
        ProfileStage(devices=("cpu-1thread=cpu:0",)).run(path, tmp_path / "measured")
    assert str(path) in str(problem.value)
    assert not (tmp_path / "measured").exists()


@pytest.mark.parametrize("value", [math.nan, -0.5])
def test_a_time_that_is_none_leaves_the_old_profile_as_it_was(
    trace: Path, tmp_path: Path, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "x.profile.arrow"
    ProfileStage(devices=("l4",)).run(trace, output)
    before = output.read_bytes()
    monkeypatch.setattr(sources, "modelled_time", lambda kernel, device: ModelledTime(value, 0.0, 1.0, ""))
    with pytest.raises(ArtifactError, match="median_us"):
        ProfileStage(devices=("l4",)).run(trace, output)
    assert output.read_bytes() == before


def test_profiles_of_two_traces_do_not_merge(trace: Path, tmp_path: Path) -> None:
    save_trace(tmp_path / "y.trace", tiny_trace(seed=1))
    outputs = [tmp_path / "x.profile.arrow", tmp_path / "y.profile.arrow"]
    for source, output in zip((trace, tmp_path / "y.trace"), outputs):
        ProfileStage(devices=("l4",)).run(source, output)
    with pytest.raises(OriginError, match=r"x\.profile.*y\.profile"):
        load_profiles(outputs)


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(TesseraError, match=r"none\.trace"):
        ProfileStage(devices=("l4",)).run(tmp_path / "none.trace", tmp_path / "out")


def test_modelling_writes_to_standard_output_and_needs_no_torch(trace: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tessera_core.profile.stage import ProfileStage\n"
        f"ProfileStage(devices=('l4',)).run(Path({str(trace)!r}), '-')\n"
        "assert not {'torch', 'triton', 'scipy'} & sys.modules.keys()"
    )
    search = os.pathsep.join([str(ROOT / "formats"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": search},
    )
    assert done.returncode == 0, done.stderr.decode()
    (tmp_path / "piped").write_bytes(done.stdout)
    assert load_profiles([tmp_path / "piped"]).time("sig-mm", "l4").median_us > 0


def test_profiles_made_before_are_merged_in(trace: Path, tmp_path: Path) -> None:
    first, second, both = (tmp_path / f"{name}.profile.arrow" for name in ("first", "second", "both"))
    ProfileStage(devices=("l4",)).run(trace, first)
    ProfileStage(devices=("t4",)).run(trace, second)
    facts = ProfileStage(devices=("l40s",), merged=(first, second)).run(trace, both)
    assert set(load_profiles([both]).devices) == {"l4", "t4", "l40s"}
    assert facts.values["rows"] == 12
    again = tmp_path / "again.profile.arrow"
    ProfileStage(merged=(both, first)).run(trace, again)
    assert load_profiles([again]).rows == load_profiles([both]).rows


def test_a_profile_of_another_program_is_not_merged_in(trace: Path, tmp_path: Path) -> None:
    save_trace(tmp_path / "y.trace", tiny_trace(seed=1))
    ProfileStage(devices=("l4",)).run(tmp_path / "y.trace", tmp_path / "y.profile.arrow")
    stage = ProfileStage(devices=("l4",), merged=(tmp_path / "y.profile.arrow",))
    with pytest.raises(OriginError, match=r"x\.trace.*y\.profile"):
        stage.run(trace, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_slices_and_dtypes_are_types_of_their_own(trace: Path, tmp_path: Path) -> None:
    names = ("h200-sxm", "h200-sxm/sm=36", "h200-sxm/dtype=float8", "h200-sxm/sm=36/dtype=float8")
    output = tmp_path / "x.profile.arrow"
    ProfileStage(devices=names, tables=False).run(trace, output)
    times = load_profiles([output])
    whole, part, small, both = (times.time("sig-mm", name) for name in names)
    assert part.median_us >= whole.median_us
    assert (whole.dtype, small.dtype, both.dtype) == ("float32", "float8", "float8")
    assert small.bytes == whole.bytes - 3 * 32 * 32  # one byte for each of the weight's four
    assert times.time("sig-add", names[2]).dtype == times.time("sig-add", names[0]).dtype


def test_users_types_are_profiled_and_named(trace: Path, tmp_path: Path) -> None:
    own = tmp_path / "my.toml"
    own.write_text(
        '[[source]]\nid = "mine"\ntitle = "Mine"\n[[type]]\nname = "gpu-x"\nkind = "gpu"\nsource = "mine"\n'
        'hardware = "GPU X"\nmemory_gb = 10\nl2_mb = 4\nmultiprocessors = 8\n[type.datasheet]\nsource = "mine"\n'
        "memory_gbyte_per_s = 100\ntflop_per_s = { float32 = 1 }\n",
        encoding="utf-8",
    )
    output = tmp_path / "x.profile.arrow"
    facts = ProfileStage(devices=("gpu-x/sm=4",), catalogues=(own,)).run(trace, output)
    assert str(own) in str(facts.values["catalogue"])
    assert load_profiles([output]).devices["gpu-x/sm=4"].hardware == "GPU X"
    with pytest.raises(InputError, match="gpu-x"):
        ProfileStage(devices=("gpu-x",)).run(trace, output)


def test_without_published_tables_one_line_says_how_to_get_them(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tessera_core.profile.silicon.tables.find_package", lambda: None)
    facts = ProfileStage(devices=("l40s", "h100-sxm")).run(trace, tmp_path / "out")
    (line,) = facts.as_json()["not found"]
    assert "pip install 'tessera-toolchain[silicon]'" in line["what"]
    assert facts.as_json()["iterations"][0]["modelled_share"] == 1.0
