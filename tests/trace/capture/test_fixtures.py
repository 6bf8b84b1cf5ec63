"""The stored captures: whole, consistent, and what their README says."""

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from tessera_core.program.store import load_trace
from tessera_core.ptx.normalise import module_hash
from tessera_core.ptx.parser import parse_module
from tessera_core.trace.capture.graph import MEMCPY, MEMSET
from tessera_formats.trace import read_trace

CAPTURES = sorted((Path(__file__).parents[3] / "fixtures" / "captures").glob("*.trace"))
TARGET = "sm_90-h200"


@pytest.fixture(scope="module", params=CAPTURES, ids=lambda path: path.stem)
def stored(request: pytest.FixtureRequest) -> tuple[Any, dict[str, list[dict[str, Any]]]]:
    bundle = read_trace(request.param)
    bundle.check()
    names = [name for name in bundle.entries if name.startswith(f"targets/{TARGET}/")]
    return load_trace(request.param), {n.split("/")[2]: bundle.table(n).to_pylist() for n in names}


FUSED = {
    "gpt-oss": {"clamped_experts", "sink_attention"},
    "deepseek": {"gated_experts", "latent_attention"},
    "mamba": {"causal_convolution", "causal_convolution_step", "selective_scan", "selective_step"},
}
"""Fused operators of the families that have some."""


def test_there_is_a_capture_of_every_family() -> None:
    names = [path.stem for path in CAPTURES]
    families = (
        "llama",
        "qwen2.5-32b",
        "gpt-oss",
        "mamba",
        "qwen2.5-vl",
        "deepseek",
        "stable-diffusion",
        "demo",
    )
    assert all(any(name.startswith(family) for name in names) for family in families)


def test_fused_operators_launch_kernels_whose_ptx_is_there(stored: Any) -> None:
    trace, rows = stored
    texts = {row["module"] for row in rows["modules"] if row["language"] == "ptx"}
    seen = set()
    for row in rows["launches"]:
        target = "" if row["op"] is None else trace.programs[row["program"]].ops[row["op"]].target
        if target.startswith("tessera."):
            seen.add(target.split(".")[1])
            assert row["kind"] == "kernel" and row["module"] in texts
    model = str(trace.info["model"])
    assert seen == next((found for family, found in FUSED.items() if model.startswith(family)), set())


def test_every_kernel_has_launches(stored: Any) -> None:
    trace, rows = stored
    launched = {(row["program"], row["kernel"]) for row in rows["launches"]}
    assert launched == {(p.id, k.id) for p in trace.programs for k in p.kernels}


def test_pointers_lie_inside_buffers_and_workspaces(stored: Any) -> None:
    trace, rows = stored
    sizes = {row["workspace"]: row["bytes"] for row in rows["workspaces"]}
    taken: dict[tuple[int, int, int], set[int]] = defaultdict(set)
    for row in rows["pointers"]:
        assert 0 <= row["byte_offset"] < sizes[row["workspace"]]
        taken[row["program"], row["kernel"], row["launch"]].add(row["offset"])
    for row in rows["launches"]:
        offsets = [r["offset"] for r in row["relocations"]]
        offsets += taken[row["program"], row["kernel"], row["launch"]]
        assert len(set(offsets)) == len(offsets) and all(offset % 8 == 0 for offset in offsets)
        for offset in offsets:
            assert row["parameters"][offset : offset + 8] == bytes(8)
        for place in row["relocations"]:
            assert 0 <= place["byte_offset"] < max(trace.buffers[place["buffer"]].bytes, 1)


def test_copies_and_fills_have_their_layout(stored: Any) -> None:
    _, rows = stored
    for row in rows["launches"]:
        if row["kind"] != "kernel":
            layout = MEMSET if row["kind"] == "memset" else MEMCPY
            assert len(row["parameters"]) == layout.size


def test_modules_hold_the_functions_that_are_launched_from_them(stored: Any) -> None:
    _, rows = stored
    entries = {}
    for row in rows["modules"]:
        if row["language"] == "ptx":
            assert row["module"] == module_hash(row["text"])
            entries[row["module"]] = {f.name for f in parse_module(row["text"], "fixture").entries()}
    launched = [row for row in rows["launches"] if row["module"] in entries]
    assert launched and all(row["function"] in entries[row["module"]] for row in launched)
    assert {row["module"] for row in launched} == set(entries)


def test_kernels_of_a_signature_differ_in_buffers_only(stored: Any) -> None:
    trace, rows = stored
    seen: dict[str, set[Any]] = defaultdict(set)
    found: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for row in rows["launches"]:
        places = tuple(r["offset"] for r in row["relocations"])
        found[row["program"], row["kernel"]].append((row["function"], row["parameters"], places))
    for (program, kernel), launches in found.items():
        seen[trace.programs[program].kernels[kernel].signature].add(tuple(launches))
    assert {len(variants) for variants in seen.values()} == {1}


def test_hopper_launches_have_clusters_and_tensor_maps() -> None:
    """What the small models lack: clusters, blocks passed whole, functions that share a name."""
    bundle = read_trace(next(path for path in CAPTURES if "8b" in path.stem))
    launches = bundle.table(f"targets/{TARGET}/launches").to_pylist()
    matrix = [row for row in launches if row["function"].startswith("nvjet")]
    assert matrix and any(row["cluster"] != [1, 1, 1] for row in matrix)
    assert min(len(row["relocations"]) for row in matrix) > 3
    packed = bundle.table(f"targets/{TARGET}/launch_attributes").to_pylist()
    assert Counter(row["attribute"] for row in packed)["packed"] == len(matrix)
    attention = {(r["function"], r["module"]) for r in launches if r["function"].startswith("cudnn")}
    assert len(attention) == 2 and len({name for name, _ in attention}) == 1
