"""What parses, what it parses to, and what is refused where."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_core.ptx.analysis import LaunchShape, analyse_launch
from tessera_core.ptx.constants import Constant, constant_expression
from tessera_core.ptx.parser import parse_module
from tessera_core.ptx.syntax import (
    Address,
    Block,
    Directive,
    Group,
    Guard,
    Immediate,
    Instruction,
    Item,
    Label,
    Module,
    Name,
    Negated,
    Pair,
    Vector,
)
from tessera_formats.errors import PtxSyntaxError
from tests.ptx.launches import FIXTURES

FILES = sorted(FIXTURES.glob("*.ptx"))
HEAD = ".version 9.4\n.target sm_100a\n.address_size 64\n"


def body(text: str) -> tuple[Item, ...]:
    parsed = parse_module(f"{HEAD}.visible .entry k(.param .u64 a) {{\n{text}\n}}\n")
    block = parsed.entries()[0].body
    assert block is not None
    return block.items


def one(text: str) -> Instruction:
    (item,) = body(text)
    assert isinstance(item, Instruction)
    return item


def instructions(block: Block) -> int:
    return sum(
        instructions(item) if isinstance(item, Block) else isinstance(item, Instruction)
        for item in block.items
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_stored_module_parses_without_losing_an_instruction(path: object) -> None:
    text = FIXTURES.joinpath(getattr(path, "name", "")).read_text()
    parsed = parse_module(text)
    counted = sum(instructions(f.body) for f in parsed.functions if f.body is not None)
    code = re.sub(r"//[^\n]*", "", text)
    statements = re.findall(r"(?m)^\s*(?:@!?%p\d+\s+)?[a-z][\w.:]*(?:\s[^;]*)?;", code)
    assert counted == len(statements) > 0
    assert parsed.entries() and parsed.address_bits == 64


def test_there_are_modules_of_both_compilers_and_three_architectures() -> None:
    assert {path.stem.rsplit(".", 1)[1] for path in FILES} == {"sm_80", "sm_90", "sm_100"}
    assert any("nvcc" in path.stem for path in FILES) and len(FILES) >= 29


@pytest.mark.parametrize(
    ("text", "operands"),
    [
        ("mov.b64 %rd1, {%r1, %r2};", (Name("%rd1"), Vector((Name("%r1"), Name("%r2"))))),
        ("ld.u32 %r1, [%rd1+-256];", (Name("%r1"), Address(Name("%rd1"), -256))),
        ("ld.u32 %r1, [ %rd1 + 0 ];", (Name("%r1"), Address(Name("%rd1"), 0))),
        ("ld.u32 %r1, [16];", (Name("%r1"), Address(Immediate(16, "16"), 0))),
        ("setp.eq.s32 %p1|%p2, %r1, -1;", (Pair(Name("%p1"), Name("%p2")), Name("%r1"), Immediate(-1, "-1"))),
        (
            "selp.u32 %r1, 0x1F, 07, !%p1;",
            (Name("%r1"), Immediate(31, "0x1F"), Immediate(7, "07"), Negated(Name("%p1"), "!")),
        ),
        ("mov.f32 %f1, 0f3F800000;", (Name("%f1"), Immediate(0x3F800000, "0f3F800000"))),
        (
            "call.uni (r), f, (x, y), P;",
            (Group((Name("r"),)), Name("f"), Group((Name("x"), Name("y"))), Name("P")),
        ),
        (
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile [%r1], [%rd14, {%r12, %r63}], [%r2];",
            (
                Address(Name("%r1"), 0),
                Address(Name("%rd14"), 0, (Vector((Name("%r12"), Name("%r63"))),)),
                Address(Name("%r2"), 0),
            ),
        ),
        ("bar.sync \t0;", (Immediate(0, "0"),)),
        (
            "ld .global\n.v2 .u32 {%r1, _}, [%rd1];",
            (Vector((Name("%r1"), Name("_"))), Address(Name("%rd1"), 0)),
        ),
        ("ld.u32%r1,[%rd1+(4*3)];", (Name("%r1"), Address(Name("%rd1"), 12))),
        ("ld.param.u32 %r1, [a+2*(1+1)-1];", (Name("%r1"), Address(Name("a"), 3))),
        ("mov.u64 %rd1, table+8;", (Name("%rd1"), Address(Name("table"), 8))),
        ("mov.u32 %r1, WARP_SZ-1;", (Name("%r1"), Immediate(31, "WARP_SZ-1"))),
        ("mov.b32 %r1, ~3;", (Name("%r1"), Immediate(-4, "~3"))),
        ("mov.b32 %r1, - 4;", (Name("%r1"), Immediate(-4, "- 4"))),
        ("mov.b64 %rd1, 0xFFFFFFFFFFFFFFFFU;", (Name("%rd1"), Immediate(2**64 - 1, "0xFFFFFFFFFFFFFFFFU"))),
        ("mov.f64 %fd1, 0dBFF0000000000000;", (Name("%fd1"), Immediate(0xBFF << 52, "0dBFF0000000000000"))),
        ("mov.f32 %f1, 1e5;", (Name("%f1"), Immediate(None, "1e5"))),
        ("mov.f32 %f1, .5;", (Name("%f1"), Immediate(None, ".5"))),
        (
            "tex.2d.v4.f32.f32 {%f1, _, _, _}, [%rd1, s, {%f2, %f3}];",
            (
                Vector((Name("%f1"), *[Name("_")] * 3)),
                Address(Name("%rd1"), 0, (Name("s"), Vector((Name("%f2"), Name("%f3"))))),
            ),
        ),
        (
            "call (r), %rd1, (x), proto;",
            (Group((Name("r"),)), Name("%rd1"), Group((Name("x"),)), Name("proto")),
        ),
        (
            "red.global.add.v2.f32 [%rd1], {%f1, 0f00000000};",
            (Address(Name("%rd1"), 0), Vector((Name("%f1"), Immediate(0, "0f00000000")))),
        ),
        ("ret;", ()),
    ],
)
def test_operands(text: str, operands: tuple[object, ...]) -> None:
    assert one(text).operands == operands


def test_guards_labels_scopes_and_directives() -> None:
    items = body(
        """@!%p1 bra $L; $L: { .reg .pred p; .reg .b32 %t<3>; @p ret; }
        T: .branchtargets A,
             B;
        P: .callprototype (.param .b32 _) _ (.param .b64 _);
        .pragma "nounroll"; .loc 1 2 3, function_name $x, inlined_at 1 2 3
        ret;"""
    )
    kinds = [type(item).__name__ for item in items]
    assert kinds == [
        "Instruction",
        "Label",
        "Block",
        "Label",
        "Directive",
        "Label",
        "Directive",
        "Directive",
        "Instruction",
    ]
    first = items[0]
    assert isinstance(first, Instruction) and first.guard is not None and first.guard.negated
    assert (
        isinstance(items[1], Label) and isinstance(items[4], Directive) and items[4].name == ".branchtargets"
    )


def test_every_form_of_a_guard_and_a_debug_line_that_shares_its_line() -> None:
    items = body(
        "@ p ret; @ ! p ret; .loc 1 2 3 @!p ret; .loc 1 2 3, function_name $i+8, inlined_at 1 5 7 ret;"
    )
    guards = [item.guard for item in items if isinstance(item, Instruction)]
    assert guards == [Guard("p", False), Guard("p", True), Guard("p", True), None]


def test_opcodes_written_apart_are_joined() -> None:
    assert one("ld .relaxed .gpu.global\t.u32 %r1, [%rd1];").opcode == "ld.relaxed.gpu.global.u32"


def test_ranges_of_branch_targets_are_spelt_out() -> None:
    _, table = body("T: .branchtargets L<3>, M;")
    assert isinstance(table, Directive) and table.text == ".branchtargets L0, L1, L2, M"


def test_a_pragma_may_hold_any_character() -> None:
    (pragma,) = body('.pragma "a; } b", "c";')
    assert isinstance(pragma, Directive) and pragma.name == ".pragma"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1+2*3", 7),
        ("(1+2)*3", 9),
        ("1 << 4 | 3", 19),
        ("2 > 1 ? 7 : 8", 7),
        ("-7/2", -3),
        ("-7%2", -1),
        ("(.u64)-1 >> 60", 15),
        ("-1 >> 60", -1),
        ("!0 && 5 != 4", 1),
        ("0xFFU ^ 0b1", 254),
        ("0x8000000000000000", 1 << 63),
    ],
)
def test_constant_expressions(text: str, value: int) -> None:
    assert constant_expression(text) == Constant(
        value, "", signed=value < 1 << 63 and "U" not in text and ".u" not in text
    )


@pytest.mark.parametrize(
    "text", ["", "1+", "1/0", "a-b", "a*2", "(1", "1.5", "%r1+1", "1 1", "(" * 40, "~" * 40 + "1"]
)
def test_what_is_no_constant_expression(text: str) -> None:
    assert constant_expression(text) is None


@given(
    st.integers(-9, 9),
    st.integers(1, 9),
    st.integers(0, 9),
    st.sampled_from("+-*|&^"),
    st.sampled_from("+-*|&^"),
)
def test_constant_expressions_bind_as_in_c(a: int, b: int, c: int, first: str, second: str) -> None:
    text = f"{a} {first} {b} {second} {c}"
    found = constant_expression(text)
    assert found is not None and found.value == eval(text)  # Python orders these operators as C does


def test_parameters_have_the_offsets_of_the_launch() -> None:
    parsed = parse_module(
        f"""{HEAD}.visible .entry k(.param .u32 a, .param .u64 .ptr.global .align 1 b, .param .u8 c,
        .param .align 64 .b8 d[128], .param .v2 .f32 e) .maxntid 128, 1, 1 .minnctapersm 2 {{ ret; }}"""
    )
    entry = parsed.entries()[0]
    assert entry.parameter_offsets() == {"a": 0, "b": 8, "c": 16, "d": 64, "e": 192}
    assert entry.parameter_bytes() == 200
    assert len(entry.directives) == 2


@pytest.mark.parametrize(
    "head",
    [
        '.entry k() .maxntid 128 , 1, 1 .minnctapersm 2 .maxnreg 32 .pragma "a";',
        ".entry k .reqntid 64 .explicitcluster .reqnctapercluster 2, 1, 1 .maxclusterrank 4 .blocksareclusters",
        ".visible .func .noreturn (.param .b32 r) f(.param .align 8 .b8 x[16]) .noreturn",
        ".func .attribute(.unified(0xAB, 0xCD)) f(.reg .b32 a, .reg .pred p) .abi_preserve 8 .abi_preserve_control 2",
        ".weak .entry k(.param .u64 .ptr .global .align 16 a, .param .u64 .ptr.const.align 4 b, .param .texref t)",
    ],
)
def test_heads_of_functions(head: str) -> None:
    parsed = parse_module(f"{HEAD}{head} {{ ret; }}")
    assert len(parsed.functions) == 1 and parsed.functions[0].body is not None


def test_the_header_may_share_its_line() -> None:
    parsed = parse_module(
        ".version 6.0 .target sm_70, texmode_independent .address_size 32 .entry k { ret; }"
    )
    assert (parsed.version, parsed.target, parsed.address_bits) == ("6.0", "sm_70, texmode_independent", 32)


def test_module_parts() -> None:
    parsed = parse_module(
        """.version 7.0 // a comment
        .target sm_80, debug /* over
        lines */
        .file 1 "a//b.cu"
        .extern .func (.param .b32 r) vprintf (.param .b64 f, .param .b64 v);
        .global .align 4 .u32 table[2] = {1, 2}, other = 3;
        .const .b8 text[4] = {72, 105, 33, 0};
        .extern .shared .align 16 .b8 smem[];
        .func (.reg .b32 r) g(.reg .b32 x) { mov.b32 r, x; ret; }
        .entry k { ret; }
        .global .u64 places[3] = {generic(table)+4, other, g}, place = table;
        .global .u8 bytes[2] = {0xff(table), 0xFF00(table)};
        .global .f32 grid[2][2] = {{1.0, -2.5e3}, {0f3F800000, 0}};
        .global .attribute(.managed, .unified(19, 95)) .u32 shared_with_host;
        .global .samplerref s = { addr_mode_0 = clamp_to_border, filter_mode = nearest };
        .alias h, g;
        .pragma "global { ; }";
        .section .debug_abbrev { .b8 1 .b32 2 }
        """
    )
    assert (parsed.version, parsed.target, parsed.address_bits) == ("7.0", "sm_80, debug", 32)
    assert [(v.space, v.name, v.bytes) for v in parsed.variables] == [
        ("global", "table", 8),
        ("global", "other", 4),
        ("const", "text", 4),
        ("shared", "smem", 0),
        ("global", "places", 24),
        ("global", "place", 8),
        ("global", "bytes", 2),
        ("global", "grid", 16),
        ("global", "shared_with_host", 4),
        ("global", "s", 8),
    ]
    initial = {v.name: v.initial for v in parsed.variables}
    assert initial["table"] == "{1, 2}" and initial["other"] == "3" and initial["smem"] == ""
    assert initial["places"] == "{generic(table)+4, other, g}" and initial["place"] == "table"
    assert initial["grid"] == "{{1.0, -2.5e3}, {0f3F800000, 0}}"
    assert [(f.name, f.is_entry, f.body is None) for f in parsed.functions] == [
        ("vprintf", False, True),
        ("g", False, False),
        ("k", True, False),
    ]
    assert parsed.line(parsed.functions[2].at) == 10


@pytest.mark.parametrize(
    ("text", "place", "expected"),
    [
        ("", "1:1", ".version"),
        ("\x7fELF\x02\x01", "1:1", ".version"),
        ("int main() { return 0; }", "1:1", ".version"),
        (HEAD + "nonsense", "4:1", "directive, variable or function"),
        (HEAD + ".entry k() {\n  mov.u32 %r1, ;\n}", "5:", "operand"),
        (HEAD + ".entry k() {\n  ld.u32 %r1, [%rd1;\n}", "5:", "']'"),
        (HEAD + ".entry k() {\n  ret;\n", "6:1", "'}'"),
        (HEAD + ".entry k(.param .u32) { ret; }", "4:", "name"),
        (HEAD + ".entry k(.param .u32 a .param .u32 b) { ret; }", "4:", "','"),
        (HEAD + ".entry k()\n ret;", "5:2", "'{'"),
        (HEAD + ".global .u32 a = {1, 2;", "4:", "initialiser"),
        (HEAD + ".global .u32 a = ;", "4:", "value"),
        (HEAD + '.global .u32 a = "abc";', "4:", "value"),
        (HEAD + ".entry k() .maxntid what { ret; }", "4:21", "'{'"),
        (".version nine\n.target sm_80", "1:1", ".version"),
        (HEAD + ".entry k() { ret;; }", "4:", "instruction"),
        (HEAD + ".entry k() { ld.u32 %r1, [%rd1+%rd2]; }", "4:", "address"),
    ],
)
def test_what_is_not_ptx_is_refused_with_its_place(text: str, place: str, expected: str) -> None:
    with pytest.raises(PtxSyntaxError) as caught:
        parse_module(text, "x.ptx")
    message = str(caught.value)
    assert message.startswith(f"x.ptx:{place}") and expected in message and "\n" not in message


PIECES = [
    "{",
    "}",
    "[",
    "]",
    ";",
    ",",
    ":",
    "@",
    "!",
    '"',
    "/*",
    "//",
    "\n",
    "%r1",
    "0x",
    ".reg",
    "<",
    "|",
    "-",
    "\0",
    "é",
]


@st.composite
def mutations(draw: st.DrawFn) -> str:
    text = draw(st.sampled_from(FILES)).read_text()
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        length = draw(st.integers(0, 40))
        filler = draw(st.sampled_from(["", *PIECES]) | st.text(max_size=8))
        text = text[:at] + filler * draw(st.integers(1, 3)) + text[at + length :]
    return text


@settings(max_examples=80, deadline=None)
@given(mutations())
def test_damaged_modules_parse_or_are_refused_and_never_crash(text: str) -> None:
    start = time.perf_counter()
    try:
        parsed = parse_module(text)
    except PtxSyntaxError:
        return
    finally:
        assert time.perf_counter() - start < 2
    analyse_somehow(parsed)


def analyse_somehow(parsed: Module) -> None:
    for entry in parsed.entries():
        launch = LaunchShape(
            entry=entry.name,
            grid=(3, 2, 1),
            block=(32, 1, 1),
            shared_bytes=0,
            parameters=bytes(min(entry.parameter_bytes(), 4096)),
            relocations=(),
        )
        analyse_launch(parsed, launch, {0: 64})


@pytest.mark.parametrize("symbol", ["{", "(", "[", "!", "-", "@", "\n", "/*", '"', "a.", ".b32 "])
def test_long_repetitions_take_no_longer_than_their_length(symbol: str) -> None:
    start = time.perf_counter()
    for text in (
        symbol * 50_000,
        HEAD + ".entry k() {" + symbol * 50_000,
        HEAD + ".entry k() { mov.b32 %r1, " + symbol * 50_000 + ";}",
    ):
        with pytest.raises(PtxSyntaxError):
            parse_module(text)
    assert time.perf_counter() - start < 2
