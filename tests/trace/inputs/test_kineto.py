"""Profiles in the public format become traces for planning; those that can't be used are refused in one line."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_core.deps.graph import load_deps
from tessera_core.program.store import load_trace
from tessera_core.trace.inputs.json_stream import entries
from tessera_formats.errors import InputError
from tessera_formats.profile import read_profile
from tessera_formats.trace import read_trace
from tests.trace.inputs.conftest import TWO_STEPS, cpu_op, launch, line, ok, profile_text, step

Write = Callable[..., Path]


def test_kernels_are_the_launches_of_the_innermost_call(
    write_profile: Write, tmp_path: Path, tessera: Callable
) -> None:
    write_profile(TWO_STEPS)
    ok(tessera("trace", "p.json", "--program", "decode:batch=4,context=9", "-o", "x.trace"))
    trace = load_trace(tmp_path / "x.trace")
    (program,) = trace.programs
    assert (program.name, program.batch) == ("decode:batch=4,context=9", 4)
    assert [kernel.name for kernel in program.kernels] == ["mm 4x8 8x16", "relu 4x16"]
    product, relu = program.kernels
    assert (product.kind, product.flops, product.dtype) == ("matmul", 2 * 4 * 8 * 16, "bfloat16")
    assert (product.read_bytes, product.written_bytes) == (2 * (4 * 8 + 8 * 16), 2 * 4 * 16)
    assert (relu.kind, relu.flops) == ("pointwise", 64)
    assert not trace.info["replayable"] and trace.info["source"] == "kineto"
    assert any("ProfilerStep#2 of 1, 2" in note for note in trace.info["notes"])
    bundle = read_trace(tmp_path / "x.trace")
    assert bundle.targets() == ("recorded-h200-sxm",)
    launches = bundle.table("targets/recorded-h200-sxm/launches").to_pylist()
    assert [(r["kernel"], r["launch"], r["function"]) for r in launches] == [
        (0, 0, "gemm_part"), (0, 1, "gemm_reduce"), (1, 0, "relu"),
    ]  # fmt: skip
    assert (launches[0]["grid"], launches[0]["block"], launches[0]["shared_bytes"]) == (
        [4, 1, 1],
        [64, 1, 1],
        16,
    )
    recorded = bundle.table("targets/recorded-h200-sxm/recorded").to_pylist()
    assert [(r["stream"], r["start_us"], r["duration_us"]) for r in recorded] == [
        (7, 0, 4),
        (7, 10, 5),
        (7, 20, 6),
    ]


def test_the_user_picks_an_iteration(write_profile: Write, tmp_path: Path, tessera: Callable) -> None:
    write_profile(TWO_STEPS)
    ok(tessera("trace", "p.json", "--iteration", 1, "-o", "x.trace"))
    assert [k.name for k in load_trace(tmp_path / "x.trace").programs[0].kernels] == ["mm 4x8 8x16"]
    assert "it has ProfilerStep 1, 2" in line(tessera("trace", "p.json", "--iteration", 3, "-o", "x.trace"))
    write_profile([*TWO_STEPS, step(3, 100, 110)])
    assert "launched nothing" in line(tessera("trace", "p.json", "--iteration", 3, "-o", "x.trace"))
    write_profile([event for event in TWO_STEPS if event["cat"] != "user_annotation"])
    ok(tessera("trace", "p.json", "-o", "x.trace"))
    trace = load_trace(tmp_path / "x.trace")
    assert (
        any("the whole file" in note for note in trace.info["notes"]) and len(trace.programs[0].kernels) == 3
    )


def test_without_storages_kernels_are_a_chain_of_the_largest_tensors(
    write_profile: Write, tmp_path: Path, tessera: Callable
) -> None:
    side = launch("other", 85, 9, 4, stream=13)
    write_profile([*TWO_STEPS, cpu_op("aten::mul", 91, 95, 5, [[2, 2], []], ["float", "Scalar"]), *side])
    side[0]["ts"] = 92.0
    write_profile([*TWO_STEPS, cpu_op("aten::mul", 91, 95, 5, [[2, 2], []], ["float", "Scalar"]), *side])
    ok(tessera("trace", "p.json", "-o", "x.trace"))
    ok(tessera("ptx-deps", "x.trace", "-o", "x.deps"))
    trace = load_trace(tmp_path / "x.trace")
    edges = load_deps(tmp_path / "x.deps").edges(0)
    sizes = {(e.source, e.destination): trace.buffers[e.buffer].bytes for e in edges if e.hazard == "RAW"}
    assert sizes == {(0, 1): 2 * 8 * 16, (1, 2): 2 * 4 * 16}, "order holds across streams too"
    assert {e.evidence for e in edges} == {"conservative"}


def test_launches_outside_any_call_and_copies(
    write_profile: Write, tmp_path: Path, tessera: Callable
) -> None:
    events = launch("replayed", 1, 1, 0) + launch(
        "Memcpy HtoD (Pinned -> Device)", 5, 2, 0, cat="gpu_memcpy", bytes=640
    )
    events += launch("Memset (Device)", 7, 3, 0, cat="gpu_memset", bytes=64)
    write_profile(events)
    ok(tessera("trace", "p.json", "-o", "x.trace"))
    kernels = load_trace(tmp_path / "x.trace").programs[0].kernels
    assert [(k.kind, k.read_bytes) for k in kernels] == [("other", 0), ("copy", 640), ("copy", 64)]


def test_recorded_times_are_measured_times_of_that_type_only(
    write_profile: Write, tmp_path: Path, tessera: Callable
) -> None:
    write_profile(TWO_STEPS)
    ok(tessera("trace", "p.json", "-o", "x.trace"))
    ok(tessera("profile", "x.trace", "--device", "h200-sxm", "--device", "l40s", "-o", "x.profile.arrow"))
    rows = read_profile(tmp_path / "x.profile.arrow").table.to_pylist()
    times = {(row["device_type"], row["source"]): row["median_us"] for row in rows if row["flops"] == 1024}
    assert times["h200-sxm", "measured"] == 4 + 5 and ("l40s", "modelled") in times
    assert all(row["low_us"] < row["median_us"] < row["high_us"] and row["samples"] <= 1 for row in rows)


def test_names_with_odd_characters(tmp_path: Path, tessera: Callable) -> None:
    odd = 'void k<"\\u0001", \\ud800, é中>(int)'
    text = profile_text([cpu_op("weird op/\u2028:: x", 0, 9, 1), *launch("NAME", 2, 1, 1)]).replace(
        "NAME", odd.replace('"', '\\"')
    )
    (tmp_path / "p.json").write_bytes(text.encode() + b"\n")
    ok(tessera("trace", "p.json", "-o", "x.trace"))
    (row,) = read_trace(tmp_path / "x.trace").table("targets/recorded-h200-sxm/launches").to_pylist()
    assert row["function"].startswith('void k<"\u0001", ?') and "é中" in row["function"]
    (tmp_path / "p.json").write_bytes(text.encode().replace("é".encode(), b"\xff"))
    ok(tessera("trace", "p.json", "-o", "x.trace"))


def test_unknown_gpus_are_named_by_the_user(write_profile: Write, tessera: Callable) -> None:
    write_profile(TWO_STEPS, gpu="NVIDIA Imaginary 9")
    assert "'NVIDIA Imaginary 9', which is not in the catalogue; say" in line(
        tessera("trace", "p.json", "-o", "x.trace")
    )
    assert "is not in the catalogue" in line(
        tessera("trace", "p.json", "--gpu-type", "h900", "-o", "x.trace")
    )
    assert (
        json.loads(ok(tessera("trace", "p.json", "--gpu-type", "l4", "-o", "x.trace", "--json")))["gpu_type"]
        == "l4"
    )


def test_a_gpu_of_the_users_catalogue_is_known_by_its_reported_name(
    write_profile: Write, tmp_path: Path, tessera: Callable
) -> None:
    write_profile(TWO_STEPS, gpu="NVIDIA Imaginary 9")
    (tmp_path / "own.toml").write_text(
        '[[type]]\nname = "imaginary"\nkind = "gpu"\nsource = "vendor"\nhardware = "NVIDIA Imaginary 9"\n'
        'reported = ["NVIDIA Imaginary 9"]\nmemory_gb = 9\nl2_mb = 9\nmultiprocessors = 9\n'
        '[type.datasheet]\nsource = "vendor"\nmemory_gbyte_per_s = 900\ntflop_per_s = { float32 = 9 }\n'
    )
    words = ("--catalogue", "own.toml", "-o", "x.trace", "--json")
    assert json.loads(ok(tessera("trace", "p.json", *words)))["gpu_type"] == "imaginary"
    done = tessera("trace", "llama-tiny", "--phase", "decode", "--context", "8", *words)
    assert done.returncode == 2 and "--catalogue: for a profile" in done.stderr


def test_several_gpus_are_refused(write_profile: Write, tessera: Callable) -> None:
    write_profile([*launch("a", 1, 1, 0), *launch("b", 2, 2, 0, device=1)])
    assert "launches on GPUs 0, 1" in line(tessera("trace", "p.json", "-o", "x.trace"))


def test_files_that_are_no_profiles(tmp_path: Path, tessera: Callable, write_profile: Write) -> None:
    whole = profile_text(TWO_STEPS).encode()
    files = {
        "half.json": (whole[: len(whole) // 2], "ends in the middle"),
        "half.json.gz": (gzip.compress(whole)[:-60], "ends in the middle"),
        "plain.json.gz": (whole, "Not a gzipped file"),
        "list.json": (b"[1, 2]", "is not the JSON of a profiler"),
        "text.json": (b"hello", "is not the JSON of a profiler"),
        "empty.json": (b"", "ends in the middle"),
        "other.json": (b'{"name": "x", "values": [1, 2]}', "it has no traceEvents"),
        "events.json": (b'{"traceEvents": [1]}', "event 1 is not as torch.profiler writes it"),
        "nan.json": (
            profile_text(launch("a", float("nan"), 1, 1)).encode(),
            "is not as torch.profiler writes it",
        ),
        "huge.json": (profile_text(launch("a", 1, 1, 1, grid=[1 << 40, 1, 1])).encode(), "out of range"),
        "cpu.json": (profile_text([cpu_op("aten::mm", 1, 2, 1)]).encode(), "holds no GPU kernels"),
    }
    ok_before = write_profile(TWO_STEPS)
    ok(tessera("trace", ok_before, "-o", "kept.trace"))
    kept = (tmp_path / "kept.trace" / "manifest.toml").read_bytes()
    for name, (content, said) in files.items():
        (tmp_path / name).write_bytes(content)
        assert said in line(tessera("trace", name, "-o", "kept.trace")), name
    assert "cannot be read" in line(tessera("trace", "gone.json", "-o", "kept.trace"))
    assert (tmp_path / "kept.trace" / "manifest.toml").read_bytes() == kept


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dur": -5}, "-5 microseconds is no time that a launch takes"),
        ({"dur": 1e12}, "is no time that a launch takes"),
        ({"dur": True}, "True is no time"),
        ({"ts": 1e300}, "is no time in microseconds"),
        ({"grid": [1.5, 1, 1]}, "1.5 is no whole number"),
        ({"device": -1}, "-1 is out of range"),
        ({"correlation": 2.5}, "2.5 is no whole number"),
    ],
)
def test_numbers_that_no_launch_has(
    changed: dict, said: str, write_profile: Write, tessera: Callable
) -> None:
    events = json.loads(json.dumps(TWO_STEPS))
    events[-1]["args"] |= changed
    events[-1] |= changed
    write_profile(events)
    assert said in line(tessera("trace", "p.json", "-o", "x.trace"))


def test_arguments_beyond_any_memory(write_profile: Write, tessera: Callable) -> None:
    wide = [[1 << 25, 1 << 25], [1 << 25, 1 << 25]]
    write_profile([cpu_op("aten::mm", 1, 9, 1, wide, ["float", "float"]), *launch("gemm", 2, 1, 1)])
    assert "larger than any GPU's memory" in line(tessera("trace", "p.json", "-o", "x.trace"))


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ([{"id": "x", "name": "NVIDIA H200"}], "has the id 'x'"),
        ([{"id": None, "name": "NVIDIA H200"}], "has the id None"),
        ([{"id": 0, "name": "NVIDIA H200"}, {"id": 0, "name": "NVIDIA L40S"}], "is both 'NVIDIA H200' and"),
    ],
)
def test_gpus_without_a_number_of_their_own(
    devices: list, said: str, tmp_path: Path, tessera: Callable
) -> None:
    content = {"deviceProperties": devices, "traceEvents": TWO_STEPS}
    (tmp_path / "p.json").write_text(json.dumps(content))
    assert said in line(tessera("trace", "p.json", "-o", "x.trace"))


def test_two_profiles_in_one_file(tmp_path: Path, tessera: Callable) -> None:
    (tmp_path / "p.json").write_text(2 * profile_text(TWO_STEPS))
    assert "is not the JSON of a profiler" in line(tessera("trace", "p.json", "-o", "x.trace"))


def test_a_clock_too_coarse_for_a_kernel_measures_nothing(
    write_profile: Write, tmp_path: Path, tessera: Callable
) -> None:
    events = json.loads(json.dumps(TWO_STEPS))
    events[-1]["dur"] = 0
    write_profile(events)
    ok(tessera("trace", "p.json", "-o", "x.trace"))
    ok(tessera("profile", "x.trace", "--device", "h200-sxm", "-o", "x.profile.arrow"))
    rows = read_profile(tmp_path / "x.profile.arrow").table.to_pylist()
    assert sorted(row["source"] for row in rows) == ["measured", "modelled"]
    assert all(row["median_us"] > 0 for row in rows)


def test_what_times_rest_on_is_noted(write_profile: Write, tessera: Callable) -> None:
    write_profile(TWO_STEPS)
    notes = json.loads(ok(tessera("trace", "p.json", "-o", "x.trace", "--json")))["notes"]
    assert not any("side by side" in note or "count as" in note for note in notes)
    events = json.loads(json.dumps(TWO_STEPS))
    events[-1]["ts"] = events[-4]["ts"] + 1.0  # relu, 6 µs, begins beside the reduction, 5 µs
    write_profile(events)
    done = tessera("trace", "p.json", "--gpu-type", "l40s", "-o", "x.trace", "--json")
    notes = json.loads(ok(done))["notes"]
    assert any("4.0 of 15.0 µs lie beside others" in note for note in notes)
    assert any("times of NVIDIA H200 (type h200-sxm) count as" in note for note in notes)


def test_options_that_do_not_go_together(write_profile: Write, tessera: Callable) -> None:
    write_profile(TWO_STEPS)
    assert tessera("trace", "llama-tiny", "--iteration", 1, "-o", "x.trace").returncode == 2
    assert tessera("trace", "p.json", "--fake", "-o", "x.trace").returncode == 2
    assert tessera("trace", "p.json", "--capture", "cuda:0", "-o", "x.trace").returncode == 2
    assert "drop --seed" in tessera("trace", "p.json", "--seed", 1, "-o", "x.trace").stderr
    assert "drop --rank" in tessera("trace", "p.json", "--rank", 1, "-o", "x.trace").stderr
    assert "--iteration: for a profile" in tessera("trace", "demo", "--iteration", 0, "--phase", "decode",
                                                   "--context", 8, "-o", "x.trace").stderr  # fmt: skip
    ok(tessera("trace", "p.json", "-o", "x.trace"))
    assert "made from a profile" in line(tessera("trace", "x.trace", "--capture", "cuda:0"))


names = st.text(max_size=6)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | names,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(
    content=st.dictionaries(names, values, max_size=5),
    array=st.lists(values, max_size=6),
    indent=st.sampled_from([None, 2]),
)
def test_the_stream_gives_what_the_library_gives(
    tmp_path_factory: pytest.TempPathFactory, content: dict, array: list, indent: int | None
) -> None:
    path = tmp_path_factory.mktemp("stream") / "x.json"
    path.write_text(json.dumps({**content, "array": array}, indent=indent))
    found = list(entries(path, ("array",)))
    assert [value for key, value in found if key == "array"] == array
    assert {key: value for key, value in found if key != "array"} == {
        k: v for k, v in content.items() if k != "array"
    }


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(0, len(profile_text(TWO_STEPS)) - 1))
def test_any_cut_is_noticed(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "x.json"
    path.write_text(profile_text(TWO_STEPS)[:cut])
    with pytest.raises(InputError):
        list(entries(path, ("traceEvents",)))
