"""`tessera ptx-deps --module`: what a kernel touches, asked without a trace."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

PTX = Path(__file__).parents[2] / "fixtures" / "ptx"
CAPTURED = Path(__file__).parents[2] / "fixtures" / "captures" / "demo.trace"
SILU = PTX / "silu_multiply.sm_90.ptx"
LAUNCH = ("--grid", 2, "--arg", "0=ptr:4096", "--arg", "arg1=ptr:4096", "--arg", "2=ptr:4096")

SMALL = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry scale(.param .u64 x, .param .u64 table, .param .u32 n)
.reqntid 128
{
  .reg .pred %p<3>; .reg .b32 %r<9>; .reg .b64 %rd<9>;
  ld.param.u64 %rd1, [x];
  ld.param.u64 %rd2, [table];
  ld.param.u32 %r1, [n];
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %tid.x;
  mad.lo.s32 %r4, %r2, 128, %r3;
  setp.ge.s32 %p1, %r4, %r1;
  @%p1 bra END;
  mul.wide.s32 %rd3, %r4, 4;
  add.s64 %rd4, %rd1, %rd3;
  ld.global.u32 %r5, [%rd4];
  mul.wide.s32 %rd5, %r5, 4;
  add.s64 %rd6, %rd2, %rd5;
  ld.global.u32 %r6, [%rd6];
  st.global.u32 [%rd4], %r6;
END:
  ret;
}
.visible .entry nothing() { ret; }
"""


def test_every_kernel_in_terms_of_its_parameters(tessera: Callable, golden: Callable) -> None:  # type: ignore[type-arg]
    done = tessera("ptx-deps", "--module", "-", stdin=SMALL.encode())
    assert (done.returncode, done.stderr) == (0, "")
    golden(done.stdout)


def test_a_launch_as_json(tessera: Callable, golden: Callable) -> None:  # type: ignore[type-arg]
    words = (
        "--entry",
        "scale",
        "--grid",
        "4",
        "--arg",
        "x=ptr:2000",
        "--arg",
        "1=ptr:64",
        "--arg",
        "n=i32:500",
    )
    done = tessera("ptx-deps", "--module", "-", "--json", *words, stdin=SMALL.encode())
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    found = {(a["parameter"], a["mode"]): a for a in facts["accesses of the launch"]}
    assert found["x", "write"]["bytes"] == found["x", "read"]["bytes"] == "[0, 2000)"
    assert found["x", "write"]["certainty"] == "must"
    assert (found["table", "read"]["bytes"], found["table", "read"]["precision"]) == ("all 64", "bounded")
    assert facts["blocks"] == [{"kernel": "scale", "blocks": 4, "independent": True, "reason": ""}]
    golden(done.stdout, ".json")


def test_hidden_pointers_that_nothing_uses_need_no_argument(tessera: Callable) -> None:  # type: ignore[type-arg]
    done = tessera("ptx-deps", "--module", SILU, *LAUNCH, "--arg", "3=hex:dc05", "--json")
    accesses = json.loads(done.stdout)["accesses of the launch"]
    assert [(a["parameter"], a["bytes"], a["precision"]) for a in accesses] == [
        (f"arg{index}", "[0, 3000)", "exact") for index in range(3)
    ]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--module", "none.ptx"), 1, "none.ptx: does not exist"),
        (("--module", "-"), 1, "standard input:1:1: expected a .version directive"),
        (("--module", SILU, "--entry", "x"), 1, "has no kernel 'x'; name one of: silu_multiply"),
        (("--module", SILU, "--grid", "0"), 1, "--grid 0: expected X, X,Y or X,Y,Z"),
        (("--module", SILU, "--arg", "0=ptr:1"), 1, "a launch needs --grid too"),
        (
            ("--module", SILU, *LAUNCH),
            1,
            "uses parameter 3 (silu_multiply_param_3, u32); give it with --arg 3=i32:",
        ),
        (("--module", SILU, *LAUNCH, "--arg", "3=i64:1"), 1, "has 4 bytes, not 8"),
        (("--module", SILU, *LAUNCH, "--arg", "3=ptr:1"), 1, "has 4 bytes, a pointer has 8"),
        (("--module", SILU, *LAUNCH, "--arg", "0=ptr:1"), 1, "parameter 0 is given twice"),
        (("--module", SILU, *LAUNCH, "--arg", "9=i32:1"), 1, "has no parameter 9; it has 0 to 5"),
        (("--module", SILU, *LAUNCH, "--arg", "3=i32:x"), 1, "expected PARAMETER=KIND:VALUE"),
        (("--module", SILU, *LAUNCH, "--arg", "3=i8:300"), 1, "expected PARAMETER=KIND:VALUE"),
        (("--module", SILU, *LAUNCH, "--arg", "3"), 1, "expected PARAMETER=KIND:VALUE"),
        (("--module", SILU, "-o", "x.deps"), 2, "--module takes no trace"),
        (("x.trace", "-o", "x.deps", "--grid", "1"), 2, "go with --module"),
        ((CAPTURED, "-o", "x.deps", "--validate"), 1, "--validate: this machine has no CUDA device"),
        (("x.trace",), 2, "name a TRACE and the folder to write"),
    ],
)
def test_what_does_not_fit_gets_one_line(
    tessera: Callable,  # type: ignore[type-arg]
    words: tuple[object, ...],
    code: int,
    message: str,
) -> None:
    if "--validate" in words:
        import torch

        if torch.cuda.is_available():
            pytest.skip("this machine has a CUDA device")
    done = tessera("ptx-deps", *words, stdin=b"# not PTX")
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_several_kernels_and_a_launch_want_a_name(tessera: Callable) -> None:  # type: ignore[type-arg]
    done = tessera("ptx-deps", "--module", "-", "--grid", "1", stdin=SMALL.encode())
    assert done.returncode == 1 and "has 2 kernels; name the one to launch with --entry" in done.stderr
    done = tessera("ptx-deps", "--module", PTX / "strided.nvcc.sm_90.ptx", "--entry", "saxpy", "--grid", "1")
    assert done.returncode == 1 and "saxpy does not say its block; add --block" in done.stderr
