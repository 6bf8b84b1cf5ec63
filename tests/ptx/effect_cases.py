"""One or more example instructions for every row of the effects table, and what a launch of four threads must then
be said to touch. The examples are written by hand from the PTX ISA: they do not read the table."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from tessera_core.ptx.analysis import LaunchAnalysis, LaunchShape, Relocation, analyse_launch
from tessera_core.ptx.parser import parse_module
from tests.ptx.launches import claimed

THREADS = 4
SIZES = {0: 4096, 1: 4096, 2: 4096, 3: 4096}

# %rd1 and %rd2: 64 bytes per thread in buffers 0 and 1, %rd5: the start of buffer 3, %rd4 and %rd6: tensor maps of
# two and three dimensions over buffer 2, %r1: the thread, %r2: shared memory, %r4: 8, %r5: 12 or 0, %p1: thread 0.
PROLOGUE = """
    .reg .b16 %h<9>; .reg .b32 %r<20>; .reg .b64 %rd<20>; .reg .b128 %q<2>; .reg .f32 %f<20>; .reg .pred %p<4>;
    .shared .align 128 .b8 s[1024];
    ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; ld.param.u64 %rd5, [c]; ld.param.u32 %r4, [n];
    cvta.to.global.u64 %rd1, %rd1; cvta.to.global.u64 %rd2, %rd2; cvta.to.global.u64 %rd5, %rd5;
    mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 64;
    add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3;
    mov.b64 %rd4, map2; cvta.param.u64 %rd4, %rd4; mov.b64 %rd6, map3; cvta.param.u64 %rd6, %rd6;
    mov.u32 %r2, s; cvt.u64.u32 %rd7, %r2; setp.eq.u32 %p1, %r1, 0; selp.u32 %r5, 12, 0, %p1;
    mov.u32 %r6, 0; mov.u32 %r7, 16; mov.u32 %r3, s; mov.b64 %rd8, 1; mov.u64 %rd9, 0;
"""
PARAMETERS = """.param .u64 a, .param .u64 b, .param .u64 c, .param .u32 n, .param .align 64 .b8 map2[128],
    .param .align 64 .b8 map3[128]"""


@dataclass(frozen=True)
class Example:
    """``row``: opcode and required modifiers of the row that is meant. ``claims``: per mode and buffer the bytes that
    may be and that must be accessed (``r0=16/16``), ``*`` where everything may be; ``targets``: PTX targets on which
    the assembler accepts the text (empty: none, the form is too new or needs more around it)."""

    row: str
    text: str
    claims: str
    targets: tuple[str, ...] = ("sm_90a", "sm_100a")


BLACKWELL = ("sm_100a",)
BULK = "mbarrier::complete_tx::bytes"

EXAMPLES = (
    Example("ld", "ld.global.u8 %h1, [%rd1];", "r0=4/4"),
    Example("ld", "ld.global.nc.L1::no_allocate.L2::128B.v4.f32 {%f1,%f2,%f3,%f4}, [%rd1+16];", "r0=64/64"),
    Example("ld", "ld.relaxed.gpu.global.b128 %q1, [%rd1];", "r0=64/64"),
    Example(
        "ld", "ld.global.v8.b32 {%r8,%r9,%r10,%r11,%r12,%r13,%r14,%r15}, [%rd1];", "r0=128/128", BLACKWELL
    ),
    Example("ld", "ld.volatile.u16 %h1, [%rd1];", "r0=8/8"),
    Example("ld", "@%p1 ld.acquire.sys.b64 %rd9, [%rd1];", "r0=8/8"),
    Example("ld", "ld.global.L2::cache_hint.b32 %r8, [%rd1], %rd8;", "r0=16/16"),
    Example("ld", "ld.global.b32 %r8, [%rd1].unified;", "r0=16/16", ()),
    Example("ld", "ld.shared.u32 %r8, [%r2];", ""),
    Example("ldu", "ldu.global.v2.f64 {%fd1, %fd2}, [%rd1];", "r0=64/64", ()),
    Example("st", "st.global.wt.v2.b16 [%rd1], {%h1, %h2};", "w0=16/16"),
    Example("st", "st.release.gpu.b32 [%rd2+4], %r1;", "w1=16/16"),
    Example("st", "st.shared::cluster.u32 [%r2], %r1;", ""),
    Example("st", "st.async.release.gpu.global.b32 [%rd1], %r1;", "w0=16/16", BLACKWELL),
    Example("st async bytes", f"st.async.shared::cluster.{BULK}.v2.b32 [%r2], {{%r1, %r1}}, [%r3];", ""),
    Example(
        "st async bytes",
        f"ld.global.u64 %rd10, [%rd1]; st.async.{BULK}.b32 [%rd10], %r1, [%rd7];",
        "r0=32/32",
        (),
    ),
    Example("st bulk", "ld.global.u64 %rd10, [%rd1]; st.bulk.weak [%rd10], 64, 0;", "r0=32/32", BLACKWELL),
    Example("st bulk", "st.bulk.weak.shared::cta [%rd7], 64, 0;", "", BLACKWELL),
    Example("atom", "atom.global.gpu.acq_rel.add.u32 %r8, [%rd1], %r1;", "r0=16/0 w0=16/0"),
    Example("atom", "atom.global.v4.f32.add %f1, [%rd1], %f2;", "r0=64/0 w0=64/0", ()),
    Example("atom", "atom.global.cas.b128 %q1, [%rd1], %q1, %q1;", "r0=64/0 w0=64/0"),
    Example("atom", "atom.exch.b64 %rd9, [%rd1], %rd8;", "r0=32/0 w0=32/0"),
    Example("red", "red.global.add.u64 [%rd1], %rd8;", "r0=32/0 w0=32/0"),
    Example("red", "red.global.add.noftz.v2.bf16x2 [%rd1], {%r8, %r9};", "r0=32/0 w0=32/0"),
    Example("red", "red.async.release.gpu.global.add.u32 [%rd1], %r1;", "r0=16/0 w0=16/0", BLACKWELL),
    Example(
        "red async bytes", f"red.async.relaxed.cluster.shared::cluster.{BULK}.inc.u32 [%r2], %r1, [%r3];", ""
    ),
    Example(
        "red async bytes",
        f"ld.global.u64 %rd10, [%rd1]; red.async.{BULK}.inc.u32 [%rd10], %r1, [%rd7];",
        "r0=32/32",
        (),
    ),
    Example("cp.async.commit_group", "cp.async.commit_group;", ""),
    Example("cp.async.wait_group", "cp.async.wait_group 0;", ""),
    Example("cp.async.wait_all", "cp.async.wait_all;", ""),
    Example("cp.async.mbarrier", "cp.async.mbarrier.arrive.noinc.b64 [%rd7];", ""),
    Example("cp.async", "cp.async.cg.shared.global [%r2], [%rd1], 16;", "r0=64/64"),
    Example("cp.async", "cp.async.ca.shared.global.L2::128B [%r2], [%rd1], 16, %r4;", "r0=32/32"),
    Example("cp.async", "cp.async.ca.shared.global [%r2], [%rd1], 16, %r5;", "r0=12/12"),
    Example("cp.async", "cp.async.ca.shared.global [%r2], [%rd1], 16, 0;", ""),
    Example("cp.async", "cp.async.ca.shared.global [%r2], [%rd1], 4, %p1;", "r0=12/12"),
    Example("cp.async", "cp.async.ca.shared.global.L2::cache_hint [%r2], [%rd1], 8, %rd8;", "r0=32/32"),
    Example("cp.async", "cp.async.ca.shared.global.L2::cache_hint [%r2], [%rd1], 8, %r5, %rd8;", "r0=8/8"),
    Example("cp.async.bulk.commit_group", "cp.async.bulk.commit_group;", ""),
    Example("cp.async.bulk.wait_group", "cp.async.bulk.wait_group.read 0;", ""),
    Example("cp.async.bulk.prefetch", "cp.async.bulk.prefetch.L2.global [%rd1], 64;", ""),
    Example(
        "cp.async.bulk.prefetch", "cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%rd4, {%r6, %r6}];", ""
    ),
    Example(
        "cp.async.bulk", f"cp.async.bulk.shared::cluster.global.{BULK} [%r2], [%rd1], 16, [%r3];", "r0=64/0"
    ),
    Example(
        "cp.async.bulk", f"@%p1 cp.async.bulk.shared::cta.global.{BULK} [%r2], [%rd1], %r7, [%r3];", "r0=16/0"
    ),
    Example(
        "cp.async.bulk",
        f"cp.async.bulk.shared::cluster.global.{BULK}.multicast::cluster [%r2], [%rd1], 32, [%r3], %h1;",
        "r0=128/0",
    ),
    Example(
        "cp.async.bulk", f"cp.async.bulk.shared::cluster.shared::cta.{BULK} [%r2], [%r3], 16, [%r3];", ""
    ),
    Example("cp.async.bulk", "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], 48;", "w0=192/192"),
    Example("cp.async.bulk", "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], %r5;", "w0=12/12"),
    Example(
        "cp.async.bulk cp_mask",
        "cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%rd1], [%r2], 16, %h1;",
        "w0=64/0",
        BLACKWELL,
    ),
    Example(
        "cp.reduce.async.bulk",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd1], [%r2], 16;",
        "r0=64/0 w0=64/0",
    ),
    Example(
        "cp.async.bulk.tensor",
        f"cp.async.bulk.tensor.2d.shared::cluster.global.tile.{BULK} [%r2], [%rd4, {{%r7, %r4}}], [%r3];",
        "r2=256/0",
    ),
    Example(  # the box reaches past both ends of the tensor
        "cp.async.bulk.tensor",
        f"mov.b32 %r8, 56; mov.b32 %r9, -3;"
        f"cp.async.bulk.tensor.2d.shared::cta.global.{BULK} [%r2], [%rd4, {{%r8, %r9}}], [%r3];",
        "r2=80/0",
    ),
    Example(
        "cp.async.bulk.tensor",
        f"cp.async.bulk.tensor.2d.shared::cluster.global.{BULK}.multicast::cluster.L2::cache_hint"
        " [%r2], [%rd4, {%r6, %r6}], [%r3], %h1, %rd8;",
        "r2=256/0",
    ),
    Example(  # one row of tiles, thread by thread
        "cp.async.bulk.tensor",
        f"shl.b32 %r8, %r1, 4;"
        f"cp.async.bulk.tensor.2d.shared::cluster.global.{BULK} [%r2], [%rd4, {{%r8, %r6}}], [%r3];",
        "r2=1024/0",
    ),
    Example(
        "cp.async.bulk.tensor",
        f"cp.async.bulk.tensor.3d.shared::cluster.global.im2col.{BULK}"
        " [%r2], [%rd6, {%r6, %r6, %r6}], [%r3], {%h1};",
        "r2=512/0",
    ),
    Example(
        "cp.async.bulk.tensor",
        f"cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.{BULK}"
        " [%r2], [%rd4, {%r6, %r6, %r6, %r6, %r6}], [%r3];",
        "r2=4096/0",
        BLACKWELL,
    ),
    Example(
        "cp.async.bulk.tensor global.shared::cta",
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd4, {%r6, %r6}], [%r2];",
        "w2=256/0",
    ),
    Example(
        "cp.async.bulk.tensor global.shared::cta",
        "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group"
        " [%rd4, {%r6, %r6, %r6, %r6, %r6}], [%r2];",
        "w2=4096/0",
        BLACKWELL,
    ),
    Example(
        "cp.reduce.async.bulk.tensor",
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%rd4, {%r6, %r6}], [%r2];",
        "r2=256/0 w2=256/0",
    ),
    Example(  # a map in memory that nobody here has built
        "cp.async.bulk.tensor",
        f"cp.async.bulk.tensor.2d.shared::cluster.global.{BULK} [%r2], [%rd5, {{%r6, %r6}}], [%r3];",
        "*",
    ),
    Example("ldmatrix", "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r8,%r9,%r10,%r11}, [%r2];", ""),
    Example("ldmatrix", "ldmatrix.sync.aligned.m8n8.x1.b16 {%r8}, [%rd7];", ""),
    Example("stmatrix", "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r2], {%r8};", ""),
    Example(
        "wmma.load",
        "wmma.load.a.sync.aligned.row.m16n16k16.global.f16 {%r8,%r9,%r10,%r11,%r12,%r13,%r14,%r15}, [%rd5], %r7;",
        "r3=512/512",
    ),
    Example(
        "wmma.load",
        "mov.b32 %r16, 24; wmma.load.b.sync.aligned.row.m32n8k16.global.f16"
        " {%r8,%r9,%r10,%r11,%r12,%r13,%r14,%r15}, [%rd5], %r16;",
        "r3=256/256",
    ),
    Example(
        "wmma.load",
        "wmma.load.c.sync.aligned.col.m16n16k16.global.f32 {%f1,%f2,%f3,%f4,%f5,%f6,%f7,%f8}, [%rd5];",
        "r3=1024/1024",
    ),
    Example(  # a stride from memory: anywhere in the allocation
        "wmma.load",
        "ld.global.u32 %r16, [%rd2]; wmma.load.c.sync.aligned.col.m16n16k16.global.f32"
        " {%f1,%f2,%f3,%f4,%f5,%f6,%f7,%f8}, [%rd5], %r16;",
        "r1=16/16 r3=4096/0",
    ),
    Example(
        "wmma.store",
        "wmma.store.d.sync.aligned.row.m8n32k16.f32 [%rd5], {%f1,%f2,%f3,%f4,%f5,%f6,%f7,%f8};",
        "w3=1024/1024",
    ),
    Example(
        "wmma.store",
        "wmma.store.d.sync.aligned.col.m16n16k16.global.f32 [%rd5], {%f1,%f2,%f3,%f4,%f5,%f6,%f7,%f8}, %r7;",
        "w3=1024/1024",
    ),
    Example(
        "wmma.store",
        "mov.b32 %r16, 8; wmma.store.d.sync.aligned.col.m16n16k16.global.f32"
        " [%rd5], {%f1,%f2,%f3,%f4,%f5,%f6,%f7,%f8}, %r16;",
        "w3=544/544",
    ),
    Example("prefetch", "prefetch.global.L2 [%rd1];", ""),
    Example("prefetch", "prefetch.tensormap [%rd4];", ""),
    Example("prefetchu", "prefetchu.L1 [%rd1];", ""),
    Example("applypriority", "applypriority.global.L2::evict_normal [%rd1], 128;", ""),
    Example("discard", "discard.global.L2 [%rd5], 128;", "w3=128/0"),
    Example(
        "tensormap.replace",
        "tensormap.replace.tile.global_dim.global.b1024.b32 [%rd5], 0, %r7;",
        "r3=128/0 w3=128/0",
    ),
    Example(
        "tensormap.replace global_address",
        "tensormap.replace.tile.global_address.global.b1024.b64 [%rd5], %rd1;",
        "r3=128/0 w3=128/0",
    ),
    Example(
        "tensormap.replace global_address",
        "tensormap.replace.tile.global_address.global.b1024.b64 [%rd5], %rd1;"
        f"cp.async.bulk.tensor.2d.shared::cluster.global.{BULK} [%r2], [%rd5, {{%r6, %r6}}], [%r3];",
        "r0=4096/0 r3=128/0 w3=128/0",
    ),
    Example(
        "tensormap.cp_fenceproxy",
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd5], [%r2], 128;",
        "w3=128/128",
    ),
    Example(  # each map leads to its own buffer
        "tensormap.cp_fenceproxy",
        "tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r2], %rd1;"
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd5], [%r2], 128;"
        "tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r2], %rd2;"
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
        " [%rd5+128], [%r2], 128;"
        "add.s64 %rd10, %rd5, 128; cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd10, {%r6, %r6}], [%r2];",
        "w1=4096/0 r3=128/0 w3=256/256",
    ),
    Example(
        "clusterlaunchcontrol.try_cancel",
        f"clusterlaunchcontrol.try_cancel.async.shared::cta.{BULK}.b128 [%r2], [%r3]; st.global.u32 [%rd1], %r1;",
        "w0=16/0",
        BLACKWELL,
    ),
    Example("multimem", "multimem.ld_reduce.global.add.u32 %r8, [%rd1];", "*"),
    Example("multimem", "multimem.st.global.u32 [%rd1], %r1;", "*"),
    Example("multimem", "multimem.red.global.add.u32 [%rd1], %r1;", "*"),
    Example("tex", "tex.1d.v4.f32.s32 {%f1,%f2,%f3,%f4}, [%rd1, {%r1}];", "*"),
    Example("tld4", "tld4.r.2d.v4.f32.f32 {%f1,%f2,%f3,%f4}, [%rd1, {%f1,%f2}];", "*"),
    Example("suld", "suld.b.1d.b32.trap {%r8}, [%rd1, {%r1}];", "*"),
    Example("sust", "sust.b.1d.b32.trap [%rd1, {%r1}], {%r8};", "*"),
    Example("sured", "sured.b.add.1d.u32.trap [%rd1, {%r1}], %r8;", "*"),
    Example("call", "call.uni unknown_function, (%rd1);", "*"),
)


def module_text(examples: Sequence[Example], target: str, version: str = "8.8") -> str:
    """A module with one kernel per example."""
    kernels = "\n".join(
        f".visible .entry k{index}({PARAMETERS}) {{\n{PROLOGUE}    {example.text}\n    ret;\n}}"
        for index, example in enumerate(examples)
    )
    declared = ".extern .func unknown_function(.param .b64 x);"
    return f".version {version}\n.target {target}\n.address_size 64\n{declared}\n{kernels}\n"


def tensor_map(
    extents: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    element: int,
    steps: Sequence[int] = (),
) -> bytes:
    """The bytes of a tensor map without its address, by the layout that `tessera_core/ptx/tensormap.py` documents."""
    content = bytearray(128)
    struct.pack_into("<I", content, 0x08, (len(extents) - 1) << 4 | element << 7)
    for index, stride in enumerate(strides):
        struct.pack_into("<I", content, 0x0C + 4 * index, (stride >> 4) & 0xFFFFFFFF)
        content[0x1C + index // 2] |= (stride >> 36) << 4 * (index % 2)
    for index, extent in enumerate(extents):
        struct.pack_into("<I", content, 0x20 + 4 * index, extent - 1)
        content[0x37 + index] = box[index] - 1
    packed = sum((step - 1) << 3 * index for index, step in enumerate(steps))
    content[0x34:0x36] = struct.pack("<H", packed)
    return bytes(content)


HALF, SINGLE = 6, 7
MAPS = (tensor_map((64, 32), (128,), (16, 8), HALF), tensor_map((8, 4, 4), (32, 128), (8, 1, 1), SINGLE))


def analyse(text: str) -> LaunchAnalysis:
    """Analyse the body ``text`` after the prologue."""
    parsed = parse_module(module_text((Example("", text, ""),), "sm_100a"))
    parameters = bytearray(320)
    parameters[24:28] = struct.pack("<I", 8)
    parameters[64:192], parameters[192:320] = MAPS
    relocations = [
        Relocation(offset, buffer, 0) for offset, buffer in ((0, 0), (8, 1), (16, 3), (64, 2), (192, 2))
    ]
    launch = LaunchShape(
        entry="k0",
        grid=(1, 1, 1),
        block=(THREADS, 1, 1),
        shared_bytes=0,
        parameters=bytes(parameters),
        relocations=tuple(relocations),
    )
    return analyse_launch(parsed, launch, SIZES)


def claims_of(text: str) -> str:
    """What the analysis claims, in the notation of :class:`Example`."""
    analysis = analyse(text)
    if analysis.fallbacks:
        return "* unknown" if analysis.unknown_opcodes else "*"
    found = []
    for mode in ("read", "write"):
        may, must = claimed(analysis, SIZES, mode, must=False), claimed(analysis, SIZES, mode, must=True)
        found += [f"{mode[0]}{b}={int(may[b].sum())}/{int(must[b].sum())}" for b in SIZES if may[b].any()]
    return " ".join(sorted(found, key=lambda claim: (claim[1], claim[0])))
