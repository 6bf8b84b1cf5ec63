"""What each PTX opcode does to memory, in one table: which operands are addresses, in which state space, read or
written, surely or perhaps, and how many bytes. An opcode that is neither here nor among the register-only ones is
unknown: it still parses, is counted, and is assumed to read and write whatever its launch can reach.

Source: PTX ISA 9.0, chapter 9 (instruction set); each row names its section and says why it is right.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from tessera_core.ptx.parser import type_bytes

# How the bytes of an operand are told: by the type (times vector lanes), by the whole matrix fragment and its
# stride, by the tensor map that the operand points to, or not at all.
Extent = Literal["type", "matrix", "tensor", "unknown"]

_NAMED_SPACES = "global local const shared shared::cta shared::cluster param param::entry param::func"
_SPACES = frozenset(_NAMED_SPACES.split())
_VECTOR_LANES = {"v2": 2, "v4": 4, "v8": 8}
_TYPE = re.compile(r"[busf]\d+(?:x\d+)?|bf16(?:x2)?|tf32|e[2345]m[0-9]\w*|pred")
_MATRIX_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")
_DESCRIPTOR_BYTES = 128  # a tensor map
_CACHE_LINE_BYTES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A fragment in memory: ``rows`` runs of ``row_bytes``, apart by ``stride_unit_bits`` times the stride operand
    (dense where the instruction names no stride)."""

    rows: int
    row_bytes: int
    stride_unit_bits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Touch:
    """One memory operand of an instruction.

    ``operand``: its index. ``space``: a state space, or ``generic``. ``bytes``: bytes per thread, or None where the
    instruction's extent is not known from its opcode. ``count_operand``: index of the operand that states the
    bytes. ``size_operand``: index of an optional operand that holds the number of bytes really touched, at most
    those, or a predicate under which nothing is. ``stride_operand``: index of the optional stride of ``matrix``.
    ``tensor``: the mode (``tile``, ``im2col``, ``gather``) in which a tensor map at this operand is followed.
    ``sure``: whether the instruction, once executed, touches every one of these bytes.
    """

    operand: int
    space: str
    reads: bool
    writes: bool
    bytes: int | None
    count_operand: int | None = None
    size_operand: int | None = None
    matrix: Matrix | None = None
    stride_operand: int | None = None
    tensor: str = ""
    sure: bool = True

    def needs(self) -> tuple[int, ...]:
        """Indices of the operands that decide which bytes are touched."""
        others = (self.count_operand, self.size_operand, self.stride_operand)
        return (self.operand, *(index for index in others if index is not None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """Everything that one opcode does to memory. ``reaches_all`` names why its addresses cannot be told at all.
    ``describes``: index of an operand that becomes the base of the tensor map at operand 0; ``copies_map``: whether
    the tensor map at operand 1 is copied there. ``cancels_blocks``: whether blocks of
    this launch may never run, others doing their work."""

    touches: tuple[Touch, ...] = ()
    reaches_all: str = ""
    known: bool = True
    describes: int | None = None
    copies_map: bool = False
    cancels_blocks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One memory operand of a row. ``mode``: ``r``, ``w`` or ``rw``. ``space`` empty: the ``named``-th space in the
    opcode, generic where it names none. ``extent``: how the bytes are told, or their number; ``count``, ``size``
    and ``stride``: indices of the operands of these meanings (see :class:`Touch`)."""

    operand: int
    mode: Literal["r", "w", "rw"]
    space: str = ""
    named: int = 0
    extent: Extent | int = "type"
    count: int | None = None
    size: int | None = None
    stride: int | None = None
    sure: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table: the opcode's leading parts, modifiers that must all be present (those joined by a dot, one
    after the other), the memory operands, and ``why``: the section of the PTX ISA, and what in it makes the row
    right."""

    opcode: str
    why: str
    requires: tuple[str, ...] = ()
    places: tuple[Place, ...] = ()
    reaches_all: str = ""
    describes: int | None = None
    copies_map: bool = False
    cancels_blocks: bool = False

    def matches(self, opcode: str) -> bool:
        """Whether the row is about this full dotted opcode."""
        dotted = f".{opcode}."
        return dotted.startswith(f".{self.opcode}.") and all(f".{part}." in dotted for part in self.requires)


_COMPLETES = "mbarrier::complete_tx::bytes"
_TO_GLOBAL = ("global.shared::cta",)
_PEERS = "a multicast address reaches the memory of peers"
_HANDLE = "the address is behind a texture or surface handle"
_CALLEE = "a called function may touch what it can reach"

# First match wins: rows with more modifiers stand before the general row of their opcode.
TABLE: tuple[Row, ...] = (
    # Loads and stores
    Row(
        opcode="ld", places=(Place(operand=1, mode="r"),), why="ld: type times vector bytes at [a], any space"
    ),
    Row(opcode="ldu", places=(Place(operand=1, mode="r"),), why="ldu: as ld, read-only data"),
    Row(
        opcode="st",
        requires=("async", _COMPLETES),
        places=(Place(operand=0, mode="w", space="shared"),),
        why="st.async: with an mbarrier, [a] is shared memory of the cluster, whatever its spelling",
    ),
    Row(
        opcode="st",
        requires=("bulk",),
        places=(Place(operand=0, mode="w", space="shared", extent="unknown", count=1),),
        why="st.bulk: fills size bytes of shared memory; a generic [a] must lie there too",
    ),
    Row(
        opcode="st", places=(Place(operand=0, mode="w"),), why="st: type times vector bytes at [a], any space"
    ),
    # Atomics. What is left behind depends on what was there, so an atomic never counts as a sure write.
    Row(
        opcode="atom",
        places=(Place(operand=1, mode="rw", sure=False),),
        why="atom: reads and rewrites type times vector bytes at [a]; cas may leave them",
    ),
    Row(
        opcode="red",
        requires=("async", _COMPLETES),
        places=(Place(operand=0, mode="rw", space="shared", sure=False),),
        why="red.async: with an mbarrier, [a] is shared memory of the cluster",
    ),
    Row(
        opcode="red",
        places=(Place(operand=0, mode="rw", sure=False),),
        why="red: as atom, without a result",
    ),
    # Asynchronous copies
    Row(opcode="cp.async.commit_group", why="cp.async.commit_group: groups copies that other rows report"),
    Row(opcode="cp.async.wait_group", why="cp.async.wait_group: waits"),
    Row(opcode="cp.async.wait_all", why="cp.async.wait_all: waits"),
    Row(opcode="cp.async.mbarrier", why="cp.async.mbarrier.arrive: an mbarrier lives in shared memory"),
    Row(opcode="cp.async.bulk.commit_group", why="cp.async.bulk.commit_group: groups copies"),
    Row(opcode="cp.async.bulk.wait_group", why="cp.async.bulk.wait_group: waits"),
    Row(opcode="cp.async.bulk.prefetch", why="cp.async.bulk.prefetch(.tensor): moves lines to L2, no value"),
    Row(
        opcode="cp.async.bulk.tensor",
        requires=_TO_GLOBAL,
        places=(
            Place(operand=0, mode="w", space="global", extent="tensor"),
            Place(operand=1, mode="r", space="shared", extent="unknown"),
        ),
        why="cp.async.bulk.tensor: the tensor map comes first where global memory is the destination",
    ),
    Row(
        opcode="cp.async.bulk.tensor",
        places=(
            Place(operand=0, mode="w", space="shared", extent="unknown"),
            Place(operand=1, mode="r", space="global", extent="tensor"),
        ),
        why="cp.async.bulk.tensor: the tensor map comes second where shared memory is the destination",
    ),
    Row(
        opcode="cp.reduce.async.bulk.tensor",
        places=(
            Place(operand=0, mode="rw", space="global", extent="tensor"),
            Place(operand=1, mode="r", space="shared", extent="unknown"),
        ),
        why="cp.reduce.async.bulk.tensor: combines shared memory into the tensor",
    ),
    Row(
        opcode="cp.async.bulk",
        requires=("cp_mask",),
        places=(
            Place(operand=0, mode="w", named=0, extent="unknown", count=2, sure=False),
            Place(operand=1, mode="r", named=1, extent="unknown", count=2),
        ),
        why="cp.async.bulk.cp_mask: only the bytes that the mask selects are written",
    ),
    Row(
        opcode="cp.async.bulk",
        places=(
            Place(operand=0, mode="w", named=0, extent="unknown", count=2),
            Place(operand=1, mode="r", named=1, extent="unknown", count=2, sure=False),
        ),
        why="cp.async.bulk: size bytes from [src] to [dst], spaces named in that order; may skip ends of the source",
    ),
    Row(
        opcode="cp.reduce.async.bulk",
        places=(
            Place(operand=0, mode="rw", named=0, extent="unknown", count=2, sure=False),
            Place(operand=1, mode="r", named=1, extent="unknown", count=2),
        ),
        why="cp.reduce.async.bulk: combines size bytes of [src] into [dst]",
    ),
    Row(
        opcode="cp.async",
        places=(
            Place(operand=0, mode="w", space="shared", extent="unknown", count=2),
            Place(operand=1, mode="r", space="global", extent="unknown", count=2, size=3),
        ),
        why="cp.async: cp-size bytes to shared; reads src-size of them, or none where ignore-src holds",
    ),
    # Matrices
    Row(
        opcode="ldmatrix",
        places=(Place(operand=1, mode="r", space="shared", extent="unknown", sure=False),),
        why="ldmatrix: [p] is shared memory, also where generic",
    ),
    Row(
        opcode="stmatrix",
        places=(Place(operand=0, mode="w", space="shared", extent="unknown", sure=False),),
        why="stmatrix: [p] is shared memory, also where generic",
    ),
    Row(
        opcode="wmma.load",
        places=(Place(operand=1, mode="r", extent="matrix", stride=2),),
        why="wmma.load: the whole fragment by the warp together, rows or columns a stride apart",
    ),
    Row(
        opcode="wmma.store",
        places=(Place(operand=0, mode="w", extent="matrix", stride=2),),
        why="wmma.store: the whole fragment by the warp together, rows or columns a stride apart",
    ),
    # Cache control
    Row(opcode="prefetch", why="prefetch: moves a line or a tensor map to a cache, no value"),
    Row(opcode="prefetchu", why="prefetchu: moves a line to the uniform cache"),
    Row(opcode="applypriority", why="applypriority: changes the eviction priority of a line, no value"),
    Row(
        opcode="discard",
        places=(Place(operand=0, mode="w", extent=_CACHE_LINE_BYTES, sure=False),),
        why="discard: drops a line unwritten, after which its bytes hold anything",
    ),
    # Tensor maps
    Row(
        opcode="tensormap.replace",
        requires=("global_address",),
        places=(Place(operand=0, mode="rw", extent=_DESCRIPTOR_BYTES, sure=False),),
        describes=1,
        why="tensormap.replace: a field of the 128-byte map at [addr]; from now on it leads to the new address",
    ),
    Row(
        opcode="tensormap.replace",
        places=(Place(operand=0, mode="rw", extent=_DESCRIPTOR_BYTES, sure=False),),
        why="tensormap.replace: a field of the 128-byte map at [addr]",
    ),
    Row(
        opcode="tensormap.cp_fenceproxy",
        copies_map=True,
        places=(
            Place(operand=0, mode="w", named=0, extent=_DESCRIPTOR_BYTES),
            Place(operand=1, mode="r", named=1, extent=_DESCRIPTOR_BYTES),
        ),
        why="tensormap.cp_fenceproxy: copies 128 bytes from shared to global memory",
    ),
    # What cannot be followed
    Row(
        opcode="clusterlaunchcontrol.try_cancel",
        cancels_blocks=True,
        why="clusterlaunchcontrol.try_cancel: takes over a block not yet started; the answer goes to shared memory",
    ),
    Row(
        opcode="multimem", reaches_all=_PEERS, why="multimem.*: one address stands for memory of several GPUs"
    ),
    Row(opcode="tex", reaches_all=_HANDLE, why="tex: the texture's memory is behind its handle"),
    Row(opcode="tld4", reaches_all=_HANDLE, why="tld4: the texture's memory is behind its handle"),
    Row(opcode="suld", reaches_all=_HANDLE, why="suld: the surface's memory is behind its handle"),
    Row(opcode="sust", reaches_all=_HANDLE, why="sust: the surface's memory is behind its handle"),
    Row(opcode="sured", reaches_all=_HANDLE, why="sured: the surface's memory is behind its handle"),
    Row(
        opcode="call", reaches_all=_CALLEE, why="call: a body that is not analysed, a launch, printf, malloc"
    ),
)

# Opcodes that touch registers, barriers, shared or tensor memory only: nothing that another launch can see.
_REGISTER_ONLY = {
    "Integer, extended-precision and mixed-precision arithmetic": """
        abs add addc bfe bfi bfind bmsk brev clz div dp2a dp4a fns mad mad24 madc max min mul mul24 neg popc rem sad
        sub subc szext""",
    "Floating point": "copysign cos ex2 fma lg2 rcp rsqrt sin sqrt tanh testp",
    "Comparison and selection": "selp set setp slct",
    "Logic and shift": "and cnot lop3 not or shf shl shr xor",
    "Moves and conversions that touch no memory": "cvt cvta isspacep mapa getctarank mov prmt shfl createpolicy",
    "Texture and surface queries, which read the handle alone": "istypep suq txq",
    "Control flow": "bra brx exit ret",
    "Synchronisation: barriers, fences and mbarriers, the latter in shared memory": """
        activemask bar barrier elect fence griddepcontrol match mbarrier membar redux vote""",
    "Cluster launch control's query of an answer in registers": "clusterlaunchcontrol",
    "Matrix multiplication on registers, shared and tensor memory": "mma movmatrix tcgen05 wgmma wmma",
    "Stack manipulation, in local memory": "alloca stackrestore stacksave",
    "Video": """
        vabsdiff vabsdiff2 vabsdiff4 vadd vadd2 vadd4 vavrg2 vavrg4 vmad vmax vmax2 vmax4 vmin vmin2 vmin4 vset vset2
        vset4 vshl vshr vsub vsub2 vsub4""",
    "Miscellaneous": "brkpt nanosleep pmevent setmaxnreg trap",
}
REGISTER_ONLY = frozenset(opcode for opcodes in _REGISTER_ONLY.values() for opcode in opcodes.split())


@lru_cache(maxsize=8192)
def effects_of(opcode: str) -> Effects:
    """The effects of a full dotted opcode (``ld.global.nc.v4.f32``)."""
    parts = opcode.split(".")
    for row in TABLE:
        if row.matches(opcode):
            return Effects(
                touches=tuple(_resolve(place, parts) for place in row.places),
                reaches_all=row.reaches_all,
                describes=row.describes,
                copies_map=row.copies_map,
                cancels_blocks=row.cancels_blocks,
            )
    if parts[0] in REGISTER_ONLY:
        return Effects()
    return Effects(reaches_all=f"unknown opcode {opcode}", known=False)


def _resolve(place: Place, parts: Sequence[str]) -> Touch:
    named = [part for part in parts[1:] if part in _SPACES]
    space = place.space or (named[place.named] if place.named < len(named) else "generic")
    matrix = _matrix(parts) if place.extent == "matrix" else None
    size: int | None = None
    if isinstance(place.extent, int):
        size = place.extent
    elif place.extent == "type":
        size = _accessed_bytes(parts)
    return Touch(
        operand=place.operand,
        space=space.split("::")[0],
        reads="r" in place.mode,
        writes="w" in place.mode,
        bytes=size,
        count_operand=place.count,
        size_operand=place.size,
        matrix=matrix,
        stride_operand=place.stride if matrix is not None else None,
        tensor=_tensor_mode(parts) if place.extent == "tensor" else "",
        sure=place.sure and place.extent != "tensor",
    )


def _accessed_bytes(parts: Sequence[str]) -> int | None:
    """Type times vector lanes, None where the opcode names no type that we know."""
    lanes = 1
    for part in parts:
        lanes *= _VECTOR_LANES.get(part, 1)
    name = next((part for part in reversed(parts) if _TYPE.fullmatch(part)), None)
    return None if name is None else type_bytes(name) * lanes


def _tensor_mode(parts: Sequence[str]) -> str:
    for part in parts:
        if part.startswith(("tile::gather", "tile::scatter")):
            return "gather"
        if part.startswith("im2col"):
            return "im2col"
    return "tile"


def _matrix(parts: Sequence[str]) -> Matrix | None:
    """The fragment of a ``wmma.load`` or ``wmma.store``: a is m by k, b is k by n, c and d are m by n."""
    shape = next((match for part in parts if (match := _MATRIX_SHAPE.fullmatch(part))), None)
    layout = next((part for part in parts if part in ("row", "col")), None)
    bits = re.fullmatch(r"(?:bf|tf|[busf])(\d+)", parts[-1])
    if shape is None or layout is None or bits is None or len(parts) < 3:
        return None
    m, n, k = (int(extent) for extent in shape.groups())
    rows, columns = {"a": (m, k), "b": (k, n)}.get(parts[2], (m, n))
    outer, inner = (rows, columns) if layout == "row" else (columns, rows)
    width = 32 if parts[-1] == "tf32" else int(bits[1])
    return Matrix(rows=outer, row_bytes=inner * width // 8, stride_unit_bits=width)
