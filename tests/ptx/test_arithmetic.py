"""Random integer programs: the addresses that the analysis derives against those that the emulator computes."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tessera_core.ptx.analysis import analyse_launch
from tessera_core.ptx.parser import parse_module
from tests.ptx.emulator import observe
from tests.ptx.launches import Pointer, claimed, launch_of
from tests.ptx.test_control_flow import HEAD

SIZE = 2048
WORDS, LONGS, FLAGS = 12, 6, 4

NUMBERS = st.sampled_from(
    [0, 1, 2, 3, 4, 7, 8, 16, 31, 32, 63, 100, 127, 255, 1023, 65535, 2**31 - 1, -1, -2, -16, -128]
)
SMALL = st.integers(0, 40)
SHIFTS = SMALL | st.sampled_from([62, 63, 64])
LARGE = st.sampled_from([2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)])

MODES = st.sampled_from(["", "", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16"])
FUNNELS = st.sampled_from(["shf.l.wrap", "shf.l.clamp", "shf.r.wrap", "shf.r.clamp"])
COUNTS = st.sampled_from(["popc.b32", "clz.b32", "brev.b32", "cnot.b32", "bfind.u32", "bfind.shiftamt.s32"])


@st.composite
def statements(draw: st.DrawFn) -> list[str]:
    """Instructions over words %r, longs %rd and flags %p; %r0 to %r3 are thread, block, parameter and their mix."""

    def word() -> str:
        return draw(st.integers(0, WORDS - 1).map(lambda i: f"%r{i}") | NUMBERS.map(str))

    def register() -> str:
        return f"%r{draw(st.integers(0, WORDS - 1))}"

    def long() -> str:
        return f"%rd{draw(st.integers(0, LONGS - 1))}"

    def flag() -> str:
        return f"%p{draw(st.integers(0, FLAGS - 1))}"

    found: list[str] = []
    for _ in range(draw(st.integers(2, 14))):
        kind = draw(st.sampled_from(["s32", "u32"]))
        wide = kind.replace("32", "64")
        guard = draw(st.sampled_from(["", "", "", f"@{flag()} ", f"@!{flag()} "]))
        narrow = draw(st.sampled_from(["s8", "u8", "s16", "u16"]))
        comparison = draw(st.sampled_from(["eq", "ne", "lt", "le", "gt", "ge"]))
        choices = [
            f"{draw(st.sampled_from(['add', 'sub', 'mul.lo', 'mul.hi', 'min', 'max', 'div', 'rem']))}.{kind} "
            f"{register()}, {register()}, {word()};",
            f"{draw(st.sampled_from(['and', 'or', 'xor']))}.b32 {register()}, {register()}, {word()};",
            f"{draw(st.sampled_from(['not.b32', 'neg.s32', 'abs.s32', 'mov.b32']))} {register()}, {register()};",
            f"mad.lo.{kind} {register()}, {register()}, {word()}, {word()};",
            f"{draw(st.sampled_from(['shl.b32', 'shr.s32', 'shr.u32']))} {register()}, {register()}, {draw(SMALL)};",
            f"{draw(st.sampled_from(['shl.b32', 'shr.s32', 'shr.u32']))} {register()}, {word()}, {register()};",
            f"bfe.{kind} {register()}, {register()}, {draw(SMALL)}, {draw(SMALL)};",
            f"setp.{comparison}.{kind} {flag()}, {register()}, {word()};",
            f"setp.{comparison}.{draw(st.sampled_from(['and', 'or', 'xor']))}.{kind} {flag()}, {register()}, "
            f"{word()}, {flag()};",
            f"{draw(st.sampled_from(['and', 'or', 'xor']))}.pred {flag()}, {flag()}, {flag()};",
            f"selp.b32 {register()}, {word()}, {word()}, {flag()};",
            f"mul.wide.{kind} {long()}, {register()}, {word()};",
            f"mad.wide.{kind} {long()}, {register()}, {word()}, {long()};",
            f"{draw(st.sampled_from(['add', 'sub', 'min', 'max', 'div', 'rem', 'mul.lo']))}.{wide} "
            f"{long()}, {long()}, {long()};",
            f"{draw(st.sampled_from(['shl.b64', 'shr.s64', 'shr.u64']))} {long()}, {long()}, {draw(SHIFTS)};",
            f"{draw(st.sampled_from(['mov.b64', 'neg.s64', 'abs.s64']))} {long()}, {draw(LARGE)};",
            f"setp.{comparison}.{wide} {flag()}, {long()}, {long()};",
            f"cvt.{wide}.{kind} {long()}, {register()};",
            f"cvt.{kind}.{wide} {register()}, {long()};",
            f"cvt.{kind}.{narrow} {register()}, {register()};",
            f"mov.b64 {{{register()}, %r11}}, {long()};",
            f"lop3.b32 {register()}, {register()}, {word()}, {word()}, {draw(st.integers(0, 255))};",
            f"prmt.b32{draw(MODES)} {register()}, {register()}, {word()}, {word()};",
            f"{draw(FUNNELS)}.b32 {register()}, {register()}, {word()}, {draw(SMALL)};",
            f"bfi.b32 {register()}, {word()}, {register()}, {draw(SMALL)}, {draw(SMALL)};",
            f"{draw(COUNTS)} {register()}, {register()};",
            f"{draw(st.sampled_from(['sad.u32', 'mad24.lo.s32', 'dp4a.s32.u32', 'fns.b32', 'slct.u32.s32']))} "
            f"{register()}, {word()}, {register()}, {word()};",
            f"{draw(st.sampled_from(['szext.wrap.s32', 'bmsk.clamp.b32', 'set.lt.u32.s32', 'mul24.hi.s32']))} "
            f"{register()}, {register()}, {word()};",
            f"{draw(st.sampled_from(['add.sat.s32', 'sub.sat.s32']))} {register()}, {register()}, {word()};",
            f"cvt.sat.{draw(st.sampled_from(['s32.s64', 'u32.s64', 'u32.u64']))} {register()}, {long()};",
            f"mul.hi.{wide} {long()}, {long()}, {long()};",
            f"mov.b64 {long()}, {{{register()}, {register()}}};",
        ]
        found.append(guard + draw(st.sampled_from(choices)))
    return found


@pytest.mark.parametrize(
    "code",
    [
        "shl.b64 %rd1, %rd0, 63;",
        "mov.b64 %rd1, 1; shl.b64 %rd1, %rd1, 63;",
        "mov.b64 %rd1, 9223372036854775807; cvt.u32.u64 %r4, %rd1; cvt.u64.u32 %rd1, %r4;",
    ],
)
def test_numbers_around_the_sign_bit_are_bounded(code: str) -> None:
    parsed = parse_module(
        f"""{HEAD}.visible .entry k(.param .u64 out) {{
        .reg .b32 %r<9>; .reg .b64 %rd<9>;
        ld.param.u64 %rd3, [out]; ld.global.u64 %rd0, [%rd3]; {code}
        and.b64 %rd2, %rd1, 15; add.s64 %rd4, %rd3, %rd2; st.global.u8 [%rd4], 1; ret;
    }}"""
    )
    launch = launch_of(parsed, "k", (1, 1, 1), (1, 1, 1), (Pointer(0),))
    written = claimed(analyse_launch(parsed, launch, {0: 64}), {0: 64}, "write", must=False)[0]
    assert 1 <= written.sum() <= 16 and not written[16:].any()


@settings(max_examples=60, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    code=statements(),
    n=NUMBERS,
    source=st.integers(0, WORDS - 1),
    long=st.booleans(),
    flag=st.integers(0, FLAGS - 1),
    branch=st.none() | st.tuples(st.integers(0, 20), st.booleans(), st.booleans()),
    trips=st.sampled_from([0, 0, 1, 3]),
)
def test_no_address_is_missed_and_none_falsely_sure(
    code: list[str],
    n: int,
    source: int,
    long: bool,
    flag: int,
    branch: tuple[int, bool, bool] | None,
    trips: int,
) -> None:
    setup = [f"mov.b32 %r{i}, {i * 37};" for i in range(3, WORDS)] + [
        f"mov.b64 %rd{i}, {i * 99};" for i in range(LONGS)
    ]
    flags = [f"setp.lt.u32 %p{i}, %r0, {i * 11};" for i in range(FLAGS)]
    body = " ".join(code)
    if branch is not None:  # skip a part of the statements, by a flag or by what memory holds
        at, sign = branch[0] % (len(code) + 1), "!" * branch[1]
        test = "ld.global.u32 %r24, [%rd20]; setp.ne.u32 %p7, %r24, 7;" if branch[2] else "mov.pred %p7, %p1;"
        body = f"{' '.join(code[:at])} {test} @{sign}%p7 bra $SKIP; {' '.join(code[at:])} $SKIP:"
    if trips:  # run them several times
        body = f"mov.b32 %r23, 0; $LOOP: {body} add.s32 %r23, %r23, 1; setp.lt.s32 %p8, %r23, {trips}; @%p8 bra $LOOP;"
    index = f"cvt.u32.u64 %r20, %rd{source % LONGS};" if long else f"mov.b32 %r20, %r{source};"
    text = f"""{HEAD}.visible .entry k(.param .u64 out, .param .u32 n) {{
        .reg .pred %p<9>; .reg .b32 %r<30>; .reg .b64 %rd<30>;
        ld.param.u64 %rd20, [out]; ld.param.u32 %r2, [n];
        mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x;
        {" ".join(setup)}
        mad.lo.u32 %r3, %r1, 16, %r0;
        {" ".join(flags)}
        {body}
        {index}
        and.b32 %r21, %r20, {SIZE - 4}; cvt.u64.u32 %rd21, %r21; add.s64 %rd22, %rd20, %rd21;
        @%p{flag} st.global.u32 [%rd22], %r0;
        ret;
    }}"""
    parsed = parse_module(text)
    launch = launch_of(parsed, "k", (3, 1, 1), (16, 1, 1), (Pointer(0), n))
    analysis = analyse_launch(parsed, launch, {0: SIZE})
    written = observe(parsed, launch, {0: bytes(SIZE)}).written[0]
    may = claimed(analysis, {0: SIZE}, "write", must=False)[0]
    must = claimed(analysis, {0: SIZE}, "write", must=True)[0]
    assert not (written & ~may).any(), "missed"
    assert not (must & ~written).any(), "falsely sure"
    assert not analysis.unknown_opcodes and not analysis.fallbacks
