from dataclasses import replace
from pathlib import Path

import pytest

from tessera_core.profile.explain import ExplainStage, find_kernel
from tessera_core.profile.merge import profile_content
from tessera_core.profile.stage import ProfileStage
from tessera_core.profile.times import TimeRow
from tessera_core.program.store import load_trace, save_trace
from tessera_formats.errors import InputError, OriginError
from tessera_formats.profile import write_profile
from tests.profile.test_times import DEVICE, ROW
from tests.profile.traces import tiny_trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    save_trace(tmp_path / "x.trace", tiny_trace())
    return tmp_path / "x.trace"


def measured(trace: Path, name: str, **change: object) -> Path:
    """A profile of one measured time of the product."""
    row = replace(
        ROW, signature="sig-mm", source="measured", samples=9, hardware="NVIDIA L4, cuda:0", low_us=9.0,
        median_us=10.0, high_us=11.0, **change,  # type: ignore[arg-type]
    )  # fmt: skip
    path = trace.parent / name
    write_profile(path, *profile_content(load_trace(trace).digest, [row], (), [DEVICE]))
    return path


def candidates(stage: ExplainStage, trace: Path, kind: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = stage.run(trace).as_json()[kind]
    return found


def test_the_measured_time_counts_and_the_modelled_stands_beside_it(trace: Path) -> None:
    path = measured(trace, "here.profile.arrow")
    stage = ExplainStage(kernel="decode/0", merged=(path,))
    first, second = candidates(stage, trace, "l4")
    assert (first["counts"], first["source"], first["found_in"]) == (True, "measured", str(path))
    assert (first["origin"], first["dated"], first["apart_share"]) == ("NVIDIA L4, cuda:0", "2026-12-01", 0.0)
    assert (second["counts"], second["source"], second["found_in"]) == (False, "modelled", "now")
    assert "roofline" in str(second["how"])
    assert second["apart_share"] == pytest.approx(float(str(second["median_us"])) / 10.0 - 1, abs=0.01)


def test_the_newest_of_two_measurements_counts_and_the_conflict_is_told(trace: Path) -> None:
    old = measured(trace, "old.profile.arrow")
    new = measured(trace, "new.profile.arrow", dated="2026-12-24T08:00:00+00:00")
    write_profile(
        new,
        *profile_content(
            load_trace(trace).digest,
            [
                replace(
                    ROW, signature="sig-mm", source="measured", samples=9, median_us=30.0, low_us=29.0,
                    high_us=31.0, dated="2026-12-24T08:00:00+00:00",
                )
            ],
            (),
            [DEVICE],
        ),
    )  # fmt: skip
    facts = ExplainStage(kernel="decode/0", merged=(old, new)).run(trace).as_json()
    assert [(row["found_in"], row["counts"]) for row in facts["l4"][:2]] == [
        (str(new), True),
        (str(old), False),
    ]
    assert facts["conflicts"][0]["worst_kept_us"] == 30.0


def test_what_counts_is_what_a_profile_made_now_would_hold(trace: Path) -> None:
    path = trace.parent / "p.profile.arrow"
    ProfileStage(devices=("l40s", "h200-sxm/sm=36"), tables=False).run(trace, path)
    stage = ExplainStage(kernel="sig-mm", devices=("h200-sxm/sm=36",), merged=(path,), tables=False)
    (only,) = candidates(stage, trace, "h200-sxm/sm=36")
    assert only["found_in"] == f"{path}, now"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("decode/0", 0),
        ("decode:batch=4,context=16/1", 1),
        ("sig-mm", 0),
        ("sig-ap", 3),
    ],
)
def test_a_kernel_goes_by_its_place_name_or_signature(text: str, number: int) -> None:
    loaded = tiny_trace()
    _, kernel = find_kernel(loaded, text)
    assert kernel.signature == loaded.programs[0].kernels[number].signature


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "decode/99"}, "has kernels 0 to"),
        ({"kernel": "prefill/0"}, "is not in the trace"),
        ({"kernel": "sig-"}, "different kernels are called so"),
        ({"kernel": "si"}, "is not in the trace"),
        ({"devices": ()}, "no device was named"),
        ({"devices": ("l5",)}, "did you mean"),
        ({"devices": ("cpu-1thread=cpu:0",)}, "measures nothing"),
    ],
)
def test_what_cannot_be_explained_is_one_line(trace: Path, options: dict[str, object], message: str) -> None:
    stage = ExplainStage(**({"kernel": "decode/0", "devices": ("l4",)} | options))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message) as problem:
        stage.run(trace)
    assert "\n" not in str(problem.value)


def test_a_profile_of_another_program_explains_nothing(trace: Path) -> None:
    path = trace.parent / "y.profile.arrow"
    write_profile(path, *profile_content("sha256:other", [ROW], (), [DEVICE]))
    with pytest.raises(OriginError, match=r"y\.profile"):
        ExplainStage(kernel="decode/0", merged=(path,)).run(trace)


def test_sources_of_the_figures_are_shown(trace: Path, tmp_path: Path) -> None:
    own = tmp_path / "my.toml"
    own.write_text(
        '[[source]]\nid = "bench"\ntitle = "Our bench"\n'
        '[[type]]\nname = "l4"\n[type.measured]\nsource = "bench"\nmemory_gbyte_per_s = 270\n'
        "tflop_per_s = { float32 = 20 }\n",
        encoding="utf-8",
    )
    stage = ExplainStage(kernel="decode/0", devices=("l4",), catalogues=(own,), tables=False)
    facts = stage.run(trace).as_json()
    said = {row["said_by"]: row["figures"] for row in facts["catalogue"]}
    assert said[f"Our bench ({own})"] == "measured.memory_gbyte_per_s 270, measured.tflop_per_s.float32 20"


def test_a_row_is_a_row(trace: Path) -> None:
    """Candidates of one content are one candidate, wherever they were found."""
    one, other = measured(trace, "one.profile.arrow"), measured(trace, "other.profile.arrow")
    rows = candidates(ExplainStage(kernel="decode/0", merged=(one, other)), trace, "l4")
    assert rows[0]["found_in"] == f"{one}, {other}"
    assert isinstance(ROW, TimeRow) and len(rows) == 2
