"""The demo's Triton kernels against their CPU implementations, and the PTX that comes of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Interpretation patches triton.language for the whole process, so it gets one of its own.
INTERPRET = """
import json, torch
from tessera_core.trace.models import demo_kernels as k
torch.manual_seed(0)
worst = {}

def compare(name, kernel, cpu, grid, arguments, result):
    by_kernel, by_cpu = torch.full_like(result, 7.0), torch.full_like(result, 8.0)
    kernel[grid](**{**arguments, "result": by_kernel})
    cpu(**{**arguments, "result": by_cpu})
    worst[name] = float((by_kernel - by_cpu).abs().max())

for rows, columns in ((3, 48), (2, 64)):
    source, weight = torch.randn(rows, columns), torch.randn(columns)
    compare(f"rms_norm {rows}x{columns}", k.rms_norm_kernel, k.rms_norm_cpu, (rows,),
            {"source": source, "weight": weight, "columns": columns, "epsilon": 1e-5, "BLOCK": 64}, source)
for batch, tokens, heads, half in ((2, 3, 4, 8), (2, 1, 2, 8)):
    source = torch.randn(batch, tokens, heads, 2 * half)
    cosines, sines = torch.randn(tokens, half), torch.randn(tokens, half)
    compare(f"rotary {batch}x{tokens}x{heads}", k.rotary_kernel, k.rotary_cpu, (heads, tokens, batch),
            {"source": source, "cosines": cosines, "sines": sines, "tokens": tokens, "heads": heads, "HALF": half},
            torch.empty(batch, heads, tokens, 2 * half))
for elements in (1, 64, 150):
    gate, up = torch.randn(elements), torch.randn(elements)
    compare(f"silu_multiply {elements}", k.silu_multiply_kernel, k.silu_multiply_cpu, (-(-elements // 64),),
            {"gate": gate, "up": up, "elements": elements, "BLOCK": 64}, gate)
print(json.dumps(worst))
"""

COMPILE = """
import json
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from tessera_core.trace.models import demo_kernels as k
jobs = {
    "rms_norm": (k.rms_norm_kernel, {"source": "*fp32", "weight": "*fp32", "result": "*fp32", "columns": "i32",
                 "epsilon": "fp32", "BLOCK": "constexpr"}, {"BLOCK": 256}),
    "rotary": (k.rotary_kernel, {"source": "*fp32", "cosines": "*fp32", "sines": "*fp32", "result": "*fp32",
               "tokens": "i32", "heads": "i32", "HALF": "constexpr"}, {"HALF": 16}),
    "silu_multiply": (k.silu_multiply_kernel, {"gate": "*fp32", "up": "*fp32", "result": "*fp32",
                      "elements": "i32", "BLOCK": "constexpr"}, {"BLOCK": 256}),
}
texts = {}
for name, (kernel, signature, constexprs) in jobs.items():
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs)
    texts[name] = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
print(json.dumps(texts))
"""


def run(code: str, **environment: str) -> dict[str, object]:
    path = os.pathsep.join(str(ROOT / folder) for folder in ("formats", "."))
    done = subprocess.run(
        [sys.executable, "-c", code] if "TRITON_INTERPRET" not in environment else [sys.executable, "-"],
        input=code,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_kernels_compute_what_their_cpu_implementations_compute() -> None:
    pytest.importorskip("triton")
    worst = run(INTERPRET, TRITON_INTERPRET="1")
    assert len(worst) == 7
    assert {name: error for name, error in worst.items() if not float(str(error)) < 1e-5} == {}


def test_kernels_compile_to_plain_loads_and_stores() -> None:
    """No atomics, no loops over memory, no indirect addresses: what the analysis bounds exactly."""
    pytest.importorskip("triton")
    for name, text in run(COMPILE).items():
        lines = [line.strip() for line in str(text).splitlines()]
        assert any("ld.global" in line for line in lines), name
        assert any("st.global" in line for line in lines), name
        assert [line for line in lines if "atom." in line or line.startswith("call")] == [], name
