"""Rows of the effects table: what launches of example instructions are said to touch."""

import re
import subprocess
from pathlib import Path

import pytest

from tessera_core.ptx.analysis import LaunchShape, Relocation, analyse_launch
from tessera_core.ptx.effects import REGISTER_ONLY, TABLE, Effects, Row, effects_of
from tessera_core.ptx.parser import parse_module
from tests.ptx.effect_cases import EXAMPLES, Example, analyse, claims_of, module_text

# Every instruction of the PTX ISA that touches no memory which another launch can see.
_TOUCHES_NOTHING = """
abs activemask add addc alloca and bar barrier bfe bfi bfind bmsk bra brev brkpt brx
clusterlaunchcontrol.query_cancel clz cnot copysign cos createpolicy cvt cvta div dp2a dp4a elect ex2 exit
fence fma fns getctarank griddepcontrol isspacep istypep lg2 lop3 mad mad24 madc mapa match max
mbarrier.init mbarrier.arrive mbarrier.try_wait membar min mma mov movmatrix mul mul24 nanosleep neg not or
pmevent popc prmt rcp redux rem ret rsqrt sad selp set setmaxnreg setp shf shfl shl shr sin slct sqrt
stackrestore stacksave sub subc suq szext tanh tcgen05.alloc tcgen05.cp tcgen05.ld tcgen05.mma tcgen05.st
testp trap txq vabsdiff vabsdiff2 vabsdiff4 vadd vadd2 vadd4 vavrg2 vavrg4 vmad vmax vmax2 vmax4 vmin vmin2
vmin4 vote vset vset2 vset4 vshl vshr vsub vsub2 vsub4 wgmma.mma_async wmma.mma xor
"""
TOUCHES_NOTHING = _TOUCHES_NOTHING.split()


def key(row: Row) -> str:
    """How examples name a row."""
    return " ".join((row.opcode, *row.requires)).replace("mbarrier::complete_tx::bytes", "bytes")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.text[:60])
def test_claims(example: Example) -> None:
    assert claims_of(example.text) == example.claims


@pytest.mark.parametrize("row", TABLE, ids=key)
def test_every_row_has_an_example_that_it_and_no_earlier_row_is_about(row: Row) -> None:
    mine = [example for example in EXAMPLES if example.row == key(row)]
    assert mine
    for example in mine:
        opcodes = re.findall(r"(?:^|;|@%p1 )\s*([a-z][\w.:]*)", example.text)
        firsts = [next((r for r in TABLE if r.matches(opcode)), None) for opcode in opcodes]
        assert row in firsts, example.text


@pytest.mark.parametrize("row", TABLE, ids=key)
def test_every_row_says_why(row: Row) -> None:
    instruction, _, reason = row.why.partition(":")
    assert instruction.split(".")[0] == row.opcode.split(".")[0] and len(reason) > 5


@pytest.mark.parametrize("opcode", TOUCHES_NOTHING)
def test_what_touches_no_memory(opcode: str) -> None:
    assert effects_of(opcode) == Effects()


def test_nothing_else_is_said_to_touch_no_memory() -> None:
    assert {opcode.split(".")[0] for opcode in TOUCHES_NOTHING} == REGISTER_ONLY
    assert not REGISTER_ONLY & {row.opcode for row in TABLE}


def test_an_opcode_that_the_table_lacks_reaches_everything_and_is_counted() -> None:
    effects = effects_of("ldx.global.u32")
    assert not effects.known and "ldx.global.u32" in effects.reaches_all
    analysis = analyse("ldx.global.u32 %r8, [%rd1];")
    assert analysis.unknown_opcodes == ("ldx.global.u32",)
    assert {(access.buffer, access.mode) for access in analysis.accesses} >= {
        (buffer, mode) for buffer in range(4) for mode in ("read", "write")
    }
    assert all(access.boxes is None and not access.must for access in analysis.accesses)


def test_no_row_is_hidden_behind_an_earlier_one() -> None:
    for index, row in enumerate(TABLE):
        for earlier in TABLE[:index]:
            hidden = f"{row.opcode}.".startswith(f"{earlier.opcode}.") and set(earlier.requires) <= set(
                row.requires
            )
            assert not hidden, f"{row.opcode} behind {earlier.opcode}"


def test_a_type_that_is_not_known_leaves_the_extent_open() -> None:
    (access,) = analyse("ld.global.zzz %r8, [%rd1];").accesses
    assert (access.buffer, access.boxes, access.precision) == (0, None, "bounded")


def test_two_tensor_maps_to_choose_from_lead_to_both_buffers() -> None:
    text = """selp.b64 %rd10, %rd4, %rd6, %p1;
    cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd10, {%r6, %r6}], [%r2];"""
    analysis = analyse(text)
    assert ("write", 2) in {(access.mode, access.buffer) for access in analysis.accesses}
    assert not any(access.must for access in analysis.accesses)


def test_a_pointer_in_a_struct_parameter_read_by_its_address_is_followed() -> None:
    parsed = parse_module(
        """.version 8.7\n.target sm_90\n.address_size 64
        .entry k(.param .align 8 .b8 s[24]) { .reg .b64 %rd<9>; .reg .b32 %r<3>;
        mov.b64 %rd1, s; cvta.param.u64 %rd2, %rd1; ld.u64 %rd3, [%rd2+16]; ld.u32 %r1, [%rd2+8];
        mul.wide.u32 %rd4, %r1, 4; add.s64 %rd5, %rd3, %rd4; st.u32 [%rd5], %r1; ret; }"""
    )
    parameters = bytes(8) + (5).to_bytes(8, "little") + bytes(8)
    launch = LaunchShape(
        entry="k",
        grid=(1, 1, 1),
        block=(1, 1, 1),
        shared_bytes=0,
        parameters=parameters,
        relocations=(_relocation(16),),
    )
    (access,) = analyse_launch(parsed, launch, {7: 64}).accesses
    assert (
        access.must and access.boxes is not None and (access.boxes[0].low, access.boxes[0].high) == (20, 24)
    )


def _relocation(offset: int) -> Relocation:
    return Relocation(offset, 7, 0)


def assembler() -> Path:
    """ptxas as the triton package brings it; skips where there is none."""
    triton = pytest.importorskip("triton", reason="triton brings the assembler")
    found = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas-blackwell"
    if not found.exists():
        pytest.skip("this build of triton brings no ptxas for sm_100")
    return found


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_the_assembler_takes_the_examples(target: str, tmp_path: Path) -> None:
    source = tmp_path / "examples.ptx"
    source.write_text(module_text([example for example in EXAMPLES if target in example.targets], target))
    command = [str(assembler()), "-c", f"-arch={target}", str(source), "-o", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
