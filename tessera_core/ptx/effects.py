"""What each PTX opcode does to memory, in one table: which operands are addresses, in which state space, read or
written, surely or perhaps, and how many bytes. An opcode that is neither here nor among the register-only ones is
unknown: it still parses, is counted, and is assumed to read and write whatever its launch can reach.

Source: PTX ISA 9.0, chapter 9 (instruction set).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from tessera_core.ptx.parser import type_bytes

Extent = Literal["type", "operand", "whole"]

_NAMED_SPACES = "global local const shared shared::cta shared::cluster param param::entry param::func"
_SPACES = frozenset(_NAMED_SPACES.split())
_VECTOR_LANES = {"v2": 2, "v4": 4, "v8": 8}
_DESCRIPTOR_BYTES = 128  # a tensor map


@dataclass(frozen=True, slots=True, kw_only=True)
class Touch:
    """One memory operand of an instruction.

    ``operand``: its index. ``space``: a state space, or ``generic``. ``bytes``: bytes per thread, or None where the
    instruction's extent is not known from its text (then the whole allocation is meant). ``size_operand``: index of
    an operand that holds the number of bytes really touched, at most ``bytes`` where that is known. ``sure``:
    whether the instruction, once executed, touches every one of these bytes.
    """

    operand: int
    space: str
    reads: bool
    writes: bool
    bytes: int | None
    size_operand: int | None = None
    sure: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """Everything that one opcode does to memory. ``reaches_all`` names why its addresses cannot be told at all."""

    touches: tuple[Touch, ...] = ()
    reaches_all: str = ""
    known: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table: the opcode's leading parts, modifiers that must all be present, and the effect.

    ``space`` empty: taken from the modifiers, generic where they name none. ``spaces``: one per touched operand
    where the opcode names several in order. ``extent``: ``type`` (type times vector lanes), ``operand`` (an
    immediate operand, ``extent_operand``), ``whole`` (not told), or a number of bytes.
    """

    opcode: str
    requires: tuple[str, ...] = ()
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    space: str = ""
    spaces: tuple[str, ...] = ()
    extent: Extent | int = "type"
    extent_operand: int | None = None
    size_operand: int | None = None
    sure: bool = True
    reaches_all: str = ""


_TENSOR_MAP = "the address is inside a tensor map"
_HANDLE = "the address is behind a texture or surface handle"

# First match wins: rows with more modifiers stand before the general row of their opcode.
TABLE: tuple[Row, ...] = (
    Row(opcode="ld", reads=(1,)),
    Row(opcode="ldu", reads=(1,)),
    Row(opcode="st", requires=("async",), writes=(0,), space="shared"),
    Row(opcode="st", requires=("bulk",), writes=(0,), space="shared", extent="whole", sure=False),
    Row(opcode="st", writes=(0,)),
    # The value left behind depends on what was there, so an atomic never counts as a sure write.
    Row(opcode="atom", reads=(1,), writes=(1,), sure=False),
    Row(opcode="red", requires=("async",), reads=(0,), writes=(0,), space="shared", sure=False),
    Row(opcode="red", reads=(0,), writes=(0,), sure=False),
    Row(opcode="cp.async.commit_group"),
    Row(opcode="cp.async.wait_group"),
    Row(opcode="cp.async.wait_all"),
    Row(opcode="cp.async.mbarrier"),
    Row(opcode="cp.async.bulk.commit_group"),
    Row(opcode="cp.async.bulk.wait_group"),
    Row(opcode="cp.async.bulk.prefetch"),
    Row(opcode="cp.async.bulk.tensor", reaches_all=_TENSOR_MAP),
    Row(opcode="cp.async.bulk", writes=(0,), reads=(1,), spaces=("", ""), extent="whole", sure=False),
    Row(opcode="cp.reduce.async.bulk.tensor", reaches_all=_TENSOR_MAP),
    Row(
        opcode="cp.reduce.async.bulk", writes=(0,), reads=(0, 1), spaces=("", ""), extent="whole", sure=False
    ),
    Row(
        opcode="cp.async",
        writes=(0,),
        reads=(1,),
        spaces=("shared", "global"),
        extent="operand",
        extent_operand=2,
        size_operand=3,
    ),
    Row(opcode="ldmatrix", reads=(1,), space="shared", extent="whole", sure=False),
    Row(opcode="stmatrix", writes=(0,), space="shared", extent="whole", sure=False),
    Row(opcode="wmma.load", reads=(1,), extent="whole", sure=False),
    Row(opcode="wmma.store", writes=(0,), extent="whole", sure=False),
    Row(opcode="prefetch"),
    Row(opcode="prefetchu"),
    Row(opcode="applypriority"),
    Row(opcode="discard", writes=(0,), extent=128, sure=False),
    Row(opcode="tensormap.replace", writes=(0,), reads=(0,), extent=_DESCRIPTOR_BYTES, sure=False),
    Row(
        opcode="tensormap.cp_fenceproxy",
        writes=(0,),
        reads=(1,),
        spaces=("global", "shared"),
        extent=_DESCRIPTOR_BYTES,
        sure=False,
    ),
    Row(opcode="multimem.ld_reduce", reaches_all="a multicast address reaches the memory of peers"),
    Row(opcode="multimem.st", reaches_all="a multicast address reaches the memory of peers"),
    Row(opcode="multimem.red", reaches_all="a multicast address reaches the memory of peers"),
    Row(opcode="tex", reaches_all=_HANDLE),
    Row(opcode="tld4", reaches_all=_HANDLE),
    Row(opcode="suld", reaches_all=_HANDLE),
    Row(opcode="sust", reaches_all=_HANDLE),
    Row(opcode="sured", reaches_all=_HANDLE),
    Row(opcode="call", reaches_all="a called function may touch what it can reach"),
)

# Opcodes that touch registers, barriers, shared or tensor memory only: nothing that another launch can see.
_REGISTER_ONLY = """
abs activemask add addc and bar barrier bfe bfi bfind bmsk bra brev brkpt brx clusterlaunchcontrol clz cnot
copysign cos createpolicy cvt cvta div dp2a dp4a elect ex2 exit fence fma fns getctarank griddepcontrol isspacep
lg2 lop3 mad mad24 madc mapa match max mbarrier membar min mma mov movmatrix mul mul24 nanosleep neg not or
pmevent popc prmt rcp redux rem ret rsqrt sad selp set setmaxnreg setp shf shfl shl shr sin slct sqrt
stackrestore stacksave sub subc suq szext tanh tcgen05 testp trap txq vabsdiff vabsdiff2 vabsdiff4 vadd vadd2
vadd4 vavrg2 vavrg4 vmad vmax vmax2 vmax4 vmin vmin2 vmin4 vote vset vset2 vset4 vshl vshr vsub vsub2 vsub4
wgmma wmma xor
"""
REGISTER_ONLY = frozenset(_REGISTER_ONLY.split())


@lru_cache(maxsize=8192)
def effects_of(opcode: str) -> Effects:
    """The effects of a full dotted opcode (``ld.global.nc.v4.f32``)."""
    parts = opcode.split(".")
    for row in TABLE:
        wanted = row.opcode.split(".")
        if parts[: len(wanted)] == wanted and all(modifier in parts for modifier in row.requires):
            return _resolve(row, parts)
    if parts[0] in REGISTER_ONLY:
        return Effects()
    return Effects(reaches_all=f"unknown opcode {opcode}", known=False)


def _resolve(row: Row, parts: list[str]) -> Effects:
    named = [part for part in parts[1:] if part in _SPACES]
    touches: list[Touch] = []
    for operand in sorted({*row.reads, *row.writes}):
        if row.spaces:
            # several spaces are named in operand order: destination, then source
            space = row.spaces[operand] or (named[operand] if operand < len(named) else "generic")
        else:
            space = row.space or (named[0] if named else "generic")
        touches.append(
            Touch(
                operand=operand,
                space=space.split("::")[0],
                reads=operand in row.reads,
                writes=operand in row.writes,
                bytes=_extent(row, parts),
                size_operand=row.size_operand,
                sure=row.sure,
            )
        )
    return Effects(touches=tuple(touches), reaches_all=row.reaches_all)


def _extent(row: Row, parts: list[str]) -> int | None:
    if isinstance(row.extent, int):
        return row.extent
    if row.extent != "type":
        return None
    lanes = 1
    for part in parts:
        lanes *= _VECTOR_LANES.get(part, 1)
    return type_bytes(parts[-1]) * lanes


def extent_operand(opcode: str) -> int | None:
    """Index of the immediate operand that states the bytes, for the rows that have one."""
    parts = opcode.split(".")
    for row in TABLE:
        wanted = row.opcode.split(".")
        if parts[: len(wanted)] == wanted and all(modifier in parts for modifier in row.requires):
            return row.extent_operand
    return None
