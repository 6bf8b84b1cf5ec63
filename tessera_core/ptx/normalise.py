"""The identity of a module: a hash of what it computes, not of how its parts are called or where it was compiled.

Comments, debug directives and debug sections are dropped; kernels, functions, parameters, variables, labels and
registers are renumbered by first appearance, registers with their type. Two builds that differ in names, paths or
line numbers alone have equal hashes; any other difference in statements, types, directives or literals shows.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

from tessera_core.ptx.lexer import LINE_DIRECTIVE, blank_comments
from tessera_core.ptx.parser import parse_module
from tessera_core.ptx.syntax import Block, Declaration, Directive, Instruction, Label, Module

_DEBUG_LINES = re.compile(rf"{LINE_DIRECTIVE}|(\"[^\"\n]*\")")
_DEBUG_SECTION = re.compile(r"\.section\s+[\w.]+\s*\{[^}]*\}")
_TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|[%$_A-Za-z][\w$%]*|[0-9][\w.]*|\.[A-Za-z_][\w:]*|\S')
_DEBUG_TARGET = re.compile(r"^(\s*\.target\s[^\n]*?)\s*,\s*debug\b", re.MULTILINE)


def module_hash(text: str) -> str:
    """sha256 (hex) of the normalised text. Raises PtxSyntaxError where ``text`` is not PTX."""
    module = parse_module(text)
    clean = blank_comments(text)
    clean = _DEBUG_SECTION.sub(
        "", _DEBUG_TARGET.sub(r"\1", _DEBUG_LINES.sub(lambda match: match[1] or "", clean))
    )
    names = _Names(module)
    tokens = _TOKEN.findall(clean)
    digest = hashlib.sha256()
    for index, token in enumerate(tokens):
        following = tokens[index + 1] if index + 1 < len(tokens) else ""
        renamed = names.rename(token, following)
        if renamed is not None:
            digest.update(renamed.encode())
            digest.update(b"\n")
    return digest.hexdigest()


class _Names:
    """Numbers given so far. Labels that nothing branches to are dropped together with their colon."""

    def __init__(self, module: Module) -> None:
        self.kinds: dict[str, str] = {}
        self.prefixes: dict[str, str] = {}
        self.numbers: dict[str, str] = {}
        self.skip_colon = False
        labels: set[str] = set()
        used: set[str] = set()
        for variable in module.variables:
            self.kinds[variable.name] = "variable"
        for function in module.functions:
            self.kinds[function.name] = "function"
            for parameter in (*function.parameters, *function.results):
                self.kinds[parameter.name] = "parameter"
            if function.body is not None:
                self._collect(function.body, labels, used)
        for label in labels:
            self.kinds[label] = "label" if label in used else ""

    def _collect(self, block: Block, labels: set[str], used: set[str]) -> None:
        for item in block.items:
            if isinstance(item, Block):
                self._collect(item, labels, used)
            elif isinstance(item, Label):
                labels.add(item.name)
            elif isinstance(item, Declaration):
                self._declare(item)
            elif isinstance(item, Directive):
                used.update(_identifiers(item.text))
            elif isinstance(item, Instruction) and item.opcode.split(".")[0] in ("bra", "brx", "call", "mov"):
                for operand in item.operands:
                    used.update(_identifiers(repr(operand)))

    def _declare(self, item: Declaration) -> None:
        if item.space != "reg":
            self.kinds[item.name] = "variable"
        elif item.count is None:
            self.kinds[item.name] = item.type
        else:
            self.prefixes[item.name] = item.type

    def rename(self, token: str, following: str) -> str | None:
        """The normalised token, None where it is dropped."""
        if self.skip_colon:
            self.skip_colon = False
            if token == ":":
                return None
        kind = self.kinds.get(token)
        if kind is None:
            stem = token.rstrip("0123456789")
            if stem in self.prefixes and stem != token:
                kind = self.prefixes[stem]
            elif token in self.prefixes and following == "<":
                return f"%{self.prefixes[token]}"
            else:
                return token
        if kind == "":
            self.skip_colon = following == ":"
            return None
        number = self.numbers.get(token)
        if number is None:
            number = self.numbers[token] = f"{kind}#{len(self.numbers)}"
        return number


def _identifiers(text: str) -> Iterable[str]:
    return re.findall(r"[%$_A-Za-z][\w$%]*", text)
