"""The syntax tree of a PTX module: what was written, with no meaning attached to opcodes. Positions are character
offsets into the module's text; :meth:`Module.line` turns them into lines only where a message needs one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Name:
    """A register, special register (``%tid.x``), variable, label or function."""

    text: str


@dataclass(frozen=True, slots=True)
class Immediate:
    """A literal. ``value``: the integer, or a float's bit pattern; None where only the spelling is known."""

    value: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Address:
    """``[base + offset, extra...]``; ``extra`` are the coordinates of texture and tensor forms. Without brackets, a
    symbol plus a constant (``mov.u64 %rd1, table+8``)."""

    base: Name | Immediate
    offset: int
    extra: tuple[Operand, ...] = ()


@dataclass(frozen=True, slots=True)
class Vector:
    """``{a, b, ...}``."""

    elements: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """``(a, b, ...)``: the results or arguments of a call."""

    elements: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """``a|b``: two destinations of one instruction."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Negated:
    """``!p`` or ``-r`` as an operand."""

    operand: Operand
    sign: str


Operand = Name | Immediate | Address | Vector | Group | Pair | Negated


def registers(operand: Operand) -> Iterator[str]:
    """Every name inside an operand."""
    if isinstance(operand, Name):
        yield operand.text
    elif isinstance(operand, Address):
        yield from registers(operand.base)
        for extra in operand.extra:
            yield from registers(extra)
    elif isinstance(operand, (Vector, Group)):
        for element in operand.elements:
            yield from registers(element)
    elif isinstance(operand, Pair):
        yield from registers(operand.first)
        yield from registers(operand.second)
    elif isinstance(operand, Negated):
        yield from registers(operand.operand)


@dataclass(frozen=True, slots=True)
class Guard:
    """``@p`` or ``@!p`` before an instruction."""

    register: str
    negated: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction with its full dotted opcode."""

    guard: Guard | None
    opcode: str
    operands: tuple[Operand, ...]
    at: int


@dataclass(frozen=True, slots=True)
class Label:
    """A branch target."""

    name: str
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """One declared name. ``count`` is N of ``%r<N>``; ``bytes`` the storage (0 where the extent is left open);
    ``initial`` the initialiser as written, empty where there is none."""

    space: str
    type: str
    name: str
    alignment: int
    bytes: int
    count: int | None
    at: int
    initial: str = ""


@dataclass(frozen=True, slots=True)
class Directive:
    """Any other directive but debug lines, as written, without its terminator (``.pragma``, ``.callprototype``).
    The short form ``L<2>`` of labels after ``.branchtargets`` is spelt out as ``L0, L1``."""

    name: str
    text: str
    at: int


@dataclass(frozen=True, slots=True)
class Block:
    """A ``{}`` scope."""

    items: tuple[Item, ...]
    at: int


Item = Instruction | Label | Declaration | Directive | Block


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """An ``.entry`` or ``.func``; ``body`` is None for a prototype."""

    name: str
    is_entry: bool
    parameters: tuple[Declaration, ...]
    results: tuple[Declaration, ...]
    directives: tuple[str, ...]
    body: Block | None
    at: int

    def parameter_offsets(self) -> dict[str, int]:
        """Byte offset of each parameter in the launch's parameter block (PTX ISA, "Kernel Function Parameters":
        in order, each at its own alignment)."""
        offsets: dict[str, int] = {}
        end = 0
        for parameter in self.parameters:
            start = -(-end // parameter.alignment) * parameter.alignment
            offsets[parameter.name] = start
            end = start + parameter.bytes
        return offsets

    def parameter_bytes(self) -> int:
        """Size of the parameter block."""
        offsets = self.parameter_offsets()
        return max((offsets[p.name] + p.bytes for p in self.parameters), default=0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Module:
    """A parsed file; two are equal only if they are the same object. ``newlines``: offsets of the line breaks."""

    name: str
    text: str
    version: str
    target: str
    address_bits: int
    functions: tuple[Function, ...]
    variables: tuple[Declaration, ...]
    newlines: tuple[int, ...]

    def line(self, at: int) -> int:
        """1-based line of a character offset."""
        return bisect_right(self.newlines, at - 1) + 1 if at else 1

    def entries(self) -> tuple[Function, ...]:
        """Kernels with a body, in order."""
        return tuple(f for f in self.functions if f.is_entry and f.body is not None)
