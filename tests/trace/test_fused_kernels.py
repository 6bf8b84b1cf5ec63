"""The fused operators' CUDA kernels without a GPU: interpreted against the CPU, and compiled for GPUs of today."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trace.fused_cases import SMALL, TOLERANCE, Case

ROOT = Path(__file__).parents[2]
# What a block of sm_86, sm_89 and sm_120 may have; sm_80, sm_90 and sm_100 have more.
SHARED_LIMIT_BYTES = 99 * 1024
KERNELS = {
    *("sink_prompt_kernel", "sink_part_kernel", "latent_part_kernel", "join_parts_kernel"),
    *("count_kernel", "sort_kernel", "gate_up_kernel", "down_kernel", "sum_slots_kernel"),
    *("convolution_kernel", "convolution_step_kernel", "step_kernel"),
    *("chunk_steps_kernel", "chunk_state_kernel", "pass_states_kernel", "chunk_scan_kernel"),
}


@cache
def answer(*words: str) -> list[dict[str, Any]]:
    """What a process of its own finds."""
    command = [sys.executable, "-m", "tests.trace.fused_process", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


# Triton's interpreter multiplies bfloat16 as integers, so float16 stands for low precision.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_a_kernel_gives_what_the_cpu_gives(case: Case, dtype: torch.dtype) -> None:
    (found,) = [
        row
        for row in answer("interpret")
        if row["case"] == case.name and row["dtype"] == str(dtype).removeprefix("torch.")
    ]
    # Tensors lie between NaN, and fresh ones are full of it.
    assert found["error"] <= TOLERANCE[dtype]
    assert found["same_layout"] and not found["wrote_outside"]


def compiles(architecture: str, *dtypes: str) -> None:
    found = answer(architecture, *dtypes)
    assert {row["kernel"] for row in found} == KERNELS
    assert all(row["shared_bytes"] <= SHARED_LIMIT_BYTES for row in found)


def test_kernels_compile_for_the_l40s() -> None:
    compiles("89", "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["80", "90", "100", "120"])
def test_kernels_compile_for_every_architecture(architecture: str) -> None:
    compiles(architecture, "bfloat16", "float32")
