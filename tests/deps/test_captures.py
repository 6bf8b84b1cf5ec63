"""Evidence launch by launch on what a GPU really launched: scratch, copies, and libraries beside compiled kernels."""

from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest

from tessera_core.deps.ptx_evidence import TargetEvidence, target_evidence
from tessera_core.program.ir import Trace
from tessera_core.program.store import load_trace
from tessera_formats.trace import read_trace

CAPTURES = Path(__file__).parents[2] / "fixtures" / "captures"
NAMES = ("demo", "llama-tiny", "llama-3-8b-4-layers")


@lru_cache
def captured(name: str) -> tuple[Trace, TargetEvidence]:
    path = CAPTURES / f"{name}.trace"
    trace = load_trace(path)
    return trace, target_evidence(trace, read_trace(path), "sm_90-h200")


def rows(name: str, table: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = (
        read_trace(CAPTURES / f"{name}.trace").table(f"targets/sm_90-h200/{table}").to_pylist()
    )
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_kernel_with_ptx_keeps_what_it_proves(name: str) -> None:
    """Also where the kernel launches a library's binary, fills scratch or points into it."""
    trace, evidence = captured(name)
    ptx = {row["module"] for row in rows(name, "modules") if row["language"] == "ptx"}
    expected = {(r["program"], r["kernel"]) for r in rows(name, "launches") if r["module"] in ptx}
    assert {(p, k) for p, found in evidence.kernels.items() for k in found} == expected
    scratch = {(row["program"], row["kernel"]) for row in rows(name, "pointers")}
    proven = {(a.program, a.kernel) for found in evidence.accesses.values() for a in found}
    if scratch & expected:
        assert scratch & expected & proven
    for program, accesses in evidence.accesses.items():
        assert all(access.buffer < len(trace.buffers) for access in accesses)
        assert {access.kernel for access in accesses} <= evidence.kernels[program]
    assert not any(evidence.chains.values())  # no PTX here counts on what a library left


def test_an_attention_of_compiled_and_library_launches() -> None:
    """demo's prefill: two compiled launches prepare scratch, a library multiplies, one more normalises."""
    trace, evidence = captured("demo")
    attention = trace.programs[0].kernels[10]
    assert "attention" in attention.name
    found = [a for a in evidence.accesses[0] if a.kernel == 10]
    assert [(a.mode, a.must, a.evidence, a.precision, a.launch) for a in found] == [
        ("read", False, "ptx", "exact", 4),
        ("read", False, "ptx", "exact", 1),
        ("read", False, "ptx", "exact", 0),
        ("write", True, "schema", "exact", None),
    ]
    assert all(a.boxes is not None and sum(b.bytes for b in a.boxes) for a in found)


def test_scratch_inside_an_output_is_not_read_from_outside() -> None:
    """llama-tiny's attention uses its output's memory as scratch in turn, before it fills it."""
    trace, evidence = captured("llama-tiny")
    attention = trace.programs[0].kernels[12]
    assert "attention" in attention.name
    output = attention.ops[-1]
    buffer = trace.tensors[trace.programs[0].ops[output].outputs[0]].buffer
    mine = [a for a in evidence.accesses[0] if a.kernel == 12 and a.buffer == buffer]
    assert mine and all(a.mode == "write" for a in mine)
    assert any(a.must and a.launch == 6 for a in mine)


@pytest.mark.parametrize("name", NAMES)
def test_reasons_name_what_is_not_exact(name: str) -> None:
    _, evidence = captured(name)
    functions = {row["function"] for row in rows(name, "launches") if row["kind"] == "kernel"}
    for count, reason in evidence.fallbacks:
        assert count > 0
        assert any(str(function) in reason for function in functions), reason
    assert not any("memset" in reason for _, reason in evidence.fallbacks)


def test_blocks_of_compiled_kernels_are_told_apart() -> None:
    _, evidence = captured("llama-3-8b-4-layers")
    splits = Counter(launch.split.independent for launch in evidence.blocks)
    assert splits[True] > 0.7 * splits.total()
    for launch in evidence.blocks:
        if launch.split.independent and launch.split.blocks > 1:
            assert launch.footprints
