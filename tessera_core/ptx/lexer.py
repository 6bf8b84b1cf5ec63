"""Cuts PTX text into statements and operands. One regular expression match per statement keeps this at several
megabytes a second; the grammar of instructions is open, so that a new opcode is never a syntax error.
"""

from __future__ import annotations

import re
from bisect import bisect_right

from tessera_core.ptx.constants import constant_expression, is_float, parse_integer
from tessera_core.ptx.syntax import Address, Group, Immediate, Name, Negated, Operand, Pair, Vector
from tessera_formats.errors import PtxSyntaxError

_NOISE = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_NOT_NEWLINE = re.compile(r"[^\n]")
_NAME = re.compile(r"[%$_A-Za-z][\w$%]*(?:::\w+)?(?:\.\w+)?", re.ASCII)
# Debug directives end where their grammar ends: an instruction may follow on the same line.
LINE_DIRECTIVE = (
    r"\.loc\s+\d+\s+\d+\s+\d+"
    r"(?:\s*,\s*function_name\s+[\w$%.]+(?:\s*\+\s*\d+)?\s*,\s*inlined_at\s+\d+\s+\d+\s+\d+)?"
    r"|\.file\s+\d+\s+\"[^\"\n]*\"(?:\s*,\s*\d+\s*,\s*\d+)?"
    r"|@@DWARF[^\n]*"
)
_ADDRESS = re.compile(r"([%$_A-Za-z0-9][\w$%:.]*)\s*([+-].*)?", re.DOTALL)
_CLOSING = {"[": "]", "{": "}", "(": ")"}


def blank_comments(text: str) -> str:
    """``text`` with comments replaced by as many blanks, so that offsets and lines stay what they were."""
    return _NOISE.sub(
        lambda match: (
            match[0]
            if match[0][0] == '"'
            else (" " * len(match[0]) if match[0][1] == "/" else _NOT_NEWLINE.sub(" ", match[0]))
        ),
        text,
    )


def newline_offsets(text: str) -> tuple[int, ...]:
    """Offset of every line break."""
    return tuple(match.start() for match in re.finditer("\n", text))


class Source:
    """The text under parse: reports errors by file, line and column, and remembers operands already seen."""

    __slots__ = ("name", "newlines", "operands", "text")

    def __init__(self, text: str, name: str) -> None:
        self.text = blank_comments(text)
        self.name = name
        self.newlines = newline_offsets(text)
        self.operands: dict[str, Operand] = {}

    def error(self, at: int, expected: str) -> PtxSyntaxError:
        """The error to raise for the text at offset ``at``."""
        line = bisect_right(self.newlines, at - 1) + 1 if at else 1
        column = at - (self.newlines[line - 2] if line > 1 else -1)
        rest = self.text[at : at + 24].split("\n", 1)[0].strip()
        found = f"found {rest!r}" if rest else "found the end of the line"
        if at >= len(self.text):
            found = "found the end of the file"
        return PtxSyntaxError(
            f"{self.name}:{line}:{column}: expected {expected}, {found}; check that it is PTX text"
        )

    def operand_list(self, text: str, at: int) -> tuple[Operand, ...]:
        """Parse comma-separated operands that start at offset ``at``."""
        seen = self.operands
        found: list[Operand] = []
        plain = "[" not in text and "{" not in text and "(" not in text
        for part in text.split(",") if plain else self._split(text, at):
            part = part.strip()
            operand = seen.get(part)
            if operand is None:
                operand = seen[part] = self._operand(part, at, 0)
            found.append(operand)
        return tuple(found)

    def _split(self, text: str, at: int) -> list[str]:
        """Split at the commas outside all brackets."""
        parts: list[str] = []
        open_brackets: list[str] = []
        start = 0
        for match in re.finditer(r"[\[\]{}(),]", text):
            symbol = match[0]
            if symbol in _CLOSING:
                open_brackets.append(_CLOSING[symbol])
            elif symbol == ",":
                if not open_brackets:
                    parts.append(text[start : match.start()])
                    start = match.end()
            elif not open_brackets or open_brackets.pop() != symbol:
                raise self.error(at + match.start(), "balanced brackets")
        if open_brackets:
            raise self.error(at + len(text), f"{open_brackets[-1]!r}")
        parts.append(text[start:])
        return parts

    def _operand(self, text: str, at: int, depth: int) -> Operand:
        if depth > 4:
            raise self.error(at, "an operand nested less deeply")
        if _NAME.fullmatch(text):
            return Name(text)
        first = text[:1]
        if first in ("[", "{", "(") and text[-1] == _CLOSING[first]:
            inside = text[1:-1].strip()
            if first == "[":
                return self._address(inside, at, depth)
            elements = self._elements(inside, at, depth)
            return Vector(elements) if first == "{" else Group(elements)
        integer = parse_integer(text)
        if integer is not None:
            return Immediate(integer, text)
        if is_float(text):
            return Immediate(int(text[2:], 16) if text[:2].lower() in ("0f", "0d") else None, text)
        if "%" not in text and (constant := constant_expression(text)) is not None:
            if not constant.symbol:
                return Immediate(constant.value, text)
            return Address(Name(constant.symbol), constant.value)
        if "|" in text:
            left, right = text.split("|", 1)
            return Pair(
                self._operand(left.strip(), at, depth + 1), self._operand(right.strip(), at, depth + 1)
            )
        if first in ("!", "-"):
            return Negated(self._operand(text[1:].strip(), at, depth + 1), first)
        if first == "+" or not text:
            raise self.error(at, "an operand")
        if text.endswith(".unified"):  # says that the address is the same on all devices
            return self._operand(text[: -len(".unified")].rstrip(), at, depth + 1)
        if text[-1] == "]" and "[" in text:  # the old spelling of an address: name[4]
            base, index = text[:-1].split("[", 1)
            offset = parse_integer(index.strip())
            if offset is not None and _NAME.fullmatch(base.strip()):
                return Address(Name(base.strip()), offset)
        raise self.error(self.text.find(text, at) if text in self.text[at : at + 4096] else at, "an operand")

    def _elements(self, text: str, at: int, depth: int) -> tuple[Operand, ...]:
        if not text:
            return ()
        return tuple(self._operand(part.strip(), at, depth + 1) for part in self._split(text, at))

    def _address(self, text: str, at: int, depth: int) -> Address:
        first, *others = self._split(text, at)
        match = _ADDRESS.fullmatch(first.strip())
        if match is None:
            raise self.error(at, "an address such as [%rd1+16]")
        base = self._operand(match[1], at, depth + 1)
        offset = _offset(match[2]) if match[2] else 0
        if offset is None or not isinstance(base, (Name, Immediate)):
            raise self.error(at, "an address such as [%rd1+16]")
        extra = tuple(self._operand(part.strip(), at, depth + 1) for part in others)
        return Address(base, offset, extra)


def _offset(text: str) -> int | None:
    """What follows the base of an address: ``+16``, ``+-256``, ``-4``, ``+(4*3)``."""
    number = parse_integer(text[1:].strip())
    if number is not None:
        return -number if text[0] == "-" else number
    constant = constant_expression(f"0{text}")
    return None if constant is None or constant.symbol else constant.value
