"""Literals and constant expressions (PTX ISA, "Constants" and "Constant Expressions"): 64-bit integers with C's
operators, and symbols plus an offset."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_INTEGER = re.compile(r"([+-]?)(?:0[xX]([0-9a-fA-F]+)|0[bB]([01]+)|(0[0-7]*|[1-9][0-9]*))U?")
_FLOAT = re.compile(
    r"[+-]?(?:0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}"
    r"|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)"
)
_TOKEN = re.compile(
    r"\s*(?:(0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|[0-9]+U?(?![\w.]))|([$_A-Za-z][\w$]*)"
    r"|(\(\s*\.[su]64\s*\))|(<<|>>|<=|>=|==|!=|&&|\|\||[-+!~*/%<>&^|?:()]))"
)
_TOKENS_LIMIT = 32  # nobody writes longer expressions; keeps hostile ones from going deep

_BITS = 64
_MASK = (1 << _BITS) - 1

# From the loosest to the tightest, as in C.
_LEVELS: tuple[tuple[str, ...], ...] = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<", ">", "<=", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
)


@dataclass(frozen=True, slots=True)
class Constant:
    """``symbol + value``, or a plain number where ``symbol`` is empty; ``signed``: its type is .s64, not .u64."""

    value: int
    symbol: str = ""
    signed: bool = True


class _NotConstant(Exception):  # noqa: N818 - a signal within this module
    pass


def parse_integer(text: str) -> int | None:
    """The value of a PTX integer literal, or None where it is not one."""
    match = _INTEGER.fullmatch(text)
    if match is None:
        return None
    sign, hexadecimal, binary, other = match.groups()
    if hexadecimal is not None:
        value = int(hexadecimal, 16)
    elif binary is not None:
        value = int(binary, 2)
    elif len(other) > 24:  # more than 64 bits, even in octal: not a number that PTX can write
        return None
    else:
        value = int(other, 8 if len(other) > 1 and other[0] == "0" else 10)
    return -value if sign == "-" else value


def is_float(text: str) -> bool:
    """Whether ``text`` is a floating-point literal, decimal or ``0f``/``0d`` with its bits."""
    return _FLOAT.fullmatch(text) is not None


def constant_expression(text: str) -> Constant | None:
    """The value of an integer constant expression, at most one symbol plus or minus numbers; None where ``text`` is
    none (a register or a floating-point number in it, unbalanced, too long)."""
    tokens: list[str] = []
    at = 0
    text = text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or len(tokens) >= _TOKENS_LIMIT:
            return None
        tokens.append(match[0].strip())
        at = match.end()
    reader = _Reader(tokens)
    try:
        found = reader.choice()
    except _NotConstant:
        return None
    return found if reader.at == len(tokens) else None


class _Reader:
    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.at = 0

    def _peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def _take(self, symbol: str) -> None:
        if self._peek() != symbol:
            raise _NotConstant
        self.at += 1

    def choice(self) -> Constant:
        condition = self._binary(0)
        if self._peek() != "?":
            return condition
        self._take("?")
        first = self.choice()
        self._take(":")
        second = self.choice()
        return first if _number(condition) else second

    def _binary(self, level: int) -> Constant:
        if level == len(_LEVELS):
            return self._unary()
        left = self._binary(level + 1)
        while (operator := self._peek()) in _LEVELS[level]:
            self.at += 1
            left = _combine(operator, left, self._binary(level + 1))
        return left

    def _unary(self) -> Constant:
        token = self._peek()
        self.at += 1
        if token in ("+", "-", "~", "!"):
            operand = self._unary()
            number = _number(operand)
            result = {"+": number, "-": -number, "~": ~number, "!": int(number == 0)}[token]
            return _fitted(result, operand.signed or token == "!")
        if token.startswith("("):
            if token != "(":
                return _fitted(_number(self._unary()), ".s64" in token)
            inside = self.choice()
            self._take(")")
            return inside
        if token[:1].isdigit():
            value = parse_integer(token)
            if value is None:
                raise _NotConstant
            return _fitted(value, not token.endswith("U") and value < 1 << (_BITS - 1))
        if token == "WARP_SZ":
            return Constant(32)
        if re.match(r"[$_A-Za-z]", token):
            return Constant(0, token)
        raise _NotConstant


def _number(constant: Constant) -> int:
    if constant.symbol:
        raise _NotConstant
    return constant.value


def _fitted(value: int, signed: bool) -> Constant:
    value &= _MASK
    return Constant(value - (1 << _BITS) if signed and value >> (_BITS - 1) else value, "", signed)


def _divide(x: int, y: int) -> int:
    if y == 0:
        raise _NotConstant
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "||": lambda x, y: int(bool(x) or bool(y)),
    "&&": lambda x, y: int(bool(x) and bool(y)),
    "|": lambda x, y: x | y,
    "^": lambda x, y: x ^ y,
    "&": lambda x, y: x & y,
    "==": lambda x, y: int(x == y),
    "!=": lambda x, y: int(x != y),
    "<": lambda x, y: int(x < y),
    ">": lambda x, y: int(x > y),
    "<=": lambda x, y: int(x <= y),
    ">=": lambda x, y: int(x >= y),
    "<<": lambda x, y: x << (y & (_BITS - 1)),
    ">>": lambda x, y: x >> (y & (_BITS - 1)),
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "/": _divide,
    "%": lambda x, y: x - y * _divide(x, y),
}
_TRUTHS = frozenset({"||", "&&", "==", "!=", "<", ">", "<=", ">="})


def _combine(operator: str, left: Constant, right: Constant) -> Constant:
    if left.symbol and operator in ("+", "-") and not right.symbol:
        offset = right.value if operator == "+" else -right.value
        return Constant(left.value + offset, left.symbol)
    if right.symbol and operator == "+" and not left.symbol:
        return Constant(left.value + right.value, right.symbol)
    signed = left.signed if operator in ("<<", ">>") else left.signed and right.signed
    x, y = _fitted(_number(left), signed).value, _fitted(_number(right), signed).value
    return _fitted(_OPERATIONS[operator](x, y), signed or operator in _TRUTHS)
