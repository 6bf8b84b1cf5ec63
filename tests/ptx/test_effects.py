"""Rows of the effects table, one opcode each."""

import pytest

from tessera_core.ptx.effects import REGISTER_ONLY, TABLE, Touch, effects_of


def touch(operand: int, space: str, mode: str, size: int | None, **more: object) -> Touch:
    return Touch(operand=operand, space=space, reads="r" in mode, writes="w" in mode, bytes=size, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("opcode", "touches"),
    [
        ("ld.global.b32", (touch(1, "global", "r", 4),)),
        ("ld.global.nc.L1::no_allocate.v4.f32", (touch(1, "global", "r", 16),)),
        ("ld.global.v8.b32", (touch(1, "global", "r", 32),)),
        ("ld.volatile.u8", (touch(1, "generic", "r", 1),)),
        ("ld.relaxed.gpu.global.b128", (touch(1, "global", "r", 16),)),
        ("ld.shared::cluster.u64", (touch(1, "shared", "r", 8),)),
        ("ldu.global.v2.f64", (touch(1, "global", "r", 16),)),
        ("st.global.wt.v2.b16", (touch(0, "global", "w", 4),)),
        ("st.b16x2", (touch(0, "generic", "w", 4),)),
        ("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32", (touch(0, "shared", "w", 4),)),
        ("atom.global.gpu.acq_rel.add.f32", (touch(1, "global", "rw", 4, sure=False),)),
        ("atom.add.noftz.v4.bf16x2", (touch(1, "generic", "rw", 16, sure=False),)),
        ("red.global.add.u64", (touch(0, "global", "rw", 8, sure=False),)),
        (
            "cp.async.cg.shared.global",
            (touch(0, "shared", "w", None, size_operand=3), touch(1, "global", "r", None, size_operand=3)),
        ),
        (
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
            (touch(0, "shared", "w", None, sure=False), touch(1, "global", "r", None, sure=False)),
        ),
        (
            "cp.async.bulk.global.shared::cta.bulk_group",
            (touch(0, "global", "w", None, sure=False), touch(1, "shared", "r", None, sure=False)),
        ),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16", (touch(1, "shared", "r", None, sure=False),)),
        ("stmatrix.sync.aligned.m8n8.x4.shared.b16", (touch(0, "shared", "w", None, sure=False),)),
        ("wmma.load.a.sync.aligned.row.m16n16k16.global.f16", (touch(1, "global", "r", None, sure=False),)),
        ("wmma.store.d.sync.aligned.row.m16n16k16.f32", (touch(0, "generic", "w", None, sure=False),)),
        (
            "tensormap.replace.tile.global_address.global.b1024.b64",
            (touch(0, "global", "rw", 128, sure=False),),
        ),
        ("discard.global.L2", (touch(0, "global", "w", 128, sure=False),)),
        ("st.async.mbarrier::complete_tx::bytes.b32", (touch(0, "shared", "w", 4),)),
        ("st.bulk.weak", (touch(0, "shared", "w", None, sure=False),)),
        ("red.async.mbarrier::complete_tx::bytes.inc.u32", (touch(0, "shared", "rw", 4, sure=False),)),
        (
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32",
            (touch(0, "global", "rw", None, sure=False), touch(1, "shared", "r", None, sure=False)),
        ),
        (
            "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned",
            (touch(0, "global", "w", 128, sure=False), touch(1, "shared", "r", 128, sure=False)),
        ),
        ("prefetch.global.L2", ()),
        ("prefetchu.L1", ()),
        ("applypriority.global.L2::evict_normal", ()),
        ("cp.async.commit_group", ()),
        ("cp.async.wait_group", ()),
        ("cp.async.wait_all", ()),
        ("cp.async.mbarrier.arrive.noinc.shared.b64", ()),
        ("cp.async.bulk.commit_group", ()),
        ("cp.async.bulk.prefetch.L2.global", ()),
        ("cp.async.bulk.prefetch.tensor.2d.L2.global", ()),
        ("cp.async.bulk.wait_group.read", ()),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", ()),
        ("wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32", ()),
        ("add.s32", ()),
    ],
)
def test_rows(opcode: str, touches: tuple[Touch, ...]) -> None:
    effects = effects_of(opcode)
    assert effects.touches == touches
    assert effects.known and not effects.reaches_all


@pytest.mark.parametrize(
    "opcode",
    [
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile",
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add",
        "multimem.ld_reduce.global.add.f32",
        "multimem.st.global.f32",
        "multimem.red.global.add.f32",
        "tex.2d.v4.f32.s32",
        "tld4.r.2d.v4.f32.f32",
        "suld.b.2d.b32.trap",
        "sust.b.2d.b32.trap",
        "sured.b.add.2d.u32.trap",
        "call.uni",
    ],
)
def test_what_reaches_beyond_its_operands_says_so(opcode: str) -> None:
    effects = effects_of(opcode)
    assert effects.reaches_all and effects.known


def test_an_opcode_that_the_table_lacks_reaches_everything() -> None:
    effects = effects_of("ldx.global.u32")
    assert not effects.known and "ldx.global.u32" in effects.reaches_all


def test_no_row_is_hidden_behind_an_earlier_one() -> None:
    for index, row in enumerate(TABLE):
        for earlier in TABLE[:index]:
            hidden = f"{row.opcode}.".startswith(f"{earlier.opcode}.") and set(earlier.requires) <= set(
                row.requires
            )
            assert not hidden, f"{row.opcode} behind {earlier.opcode}"
        assert row.opcode not in REGISTER_ONLY
