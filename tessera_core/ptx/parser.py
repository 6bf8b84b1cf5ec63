"""Statements, scopes, declarations and functions of PTX 6.0 to 9.4 as Triton and nvcc write it. The parser knows
no opcode: what an instruction does to memory is told in `effects.py` alone.
"""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Iterator
from dataclasses import replace

from tessera_core.ptx.constants import parse_integer
from tessera_core.ptx.lexer import LINE_DIRECTIVE, Source
from tessera_core.ptx.syntax import (
    Block,
    Declaration,
    Directive,
    Function,
    Guard,
    Instruction,
    Item,
    Label,
    Module,
)

_SKIP = re.compile(r"\s*")
# 1: label; 2: brace; 3: guard; 4: opcode; 5, 6: operands; 7: debug line; 8: other directive
_STATEMENT = re.compile(
    r"\s*(?:([%$_A-Za-z][\w$%]*)\s*:(?!:)"
    r"|([{}])"
    r"|(?:@\s*(!?\s*[%$_\w]+)\s+)?([a-z][\w.:]*)(?:\s*;|\s([^;\"]*);|(?=[({\[%$])([^;\"]*);)"
    rf"|({LINE_DIRECTIVE})"
    r"|(\.\w+\b(?:[^;\"]++|\"[^\"\n]*+\")*+);)",
    re.ASCII,
)
_HEADER = re.compile(
    r"\s*(?:\.version\s+(\d+\.\d+)|\.target\s+(\w+(?:\s*,\s*\w+)*)|\.address_size\s+(32|64)\b)", re.ASCII
)
_DEBUG_LINE = re.compile(rf"\s*(?:{LINE_DIRECTIVE})")
_SECTION = re.compile(r"\s*\.section\s+[\w.]+\s*\{")
_LINKAGE = re.compile(r"\s*((?:\.(?:visible|extern|weak|common)\b\s*)*)")
_ATTRIBUTES = r"\((?:[^()]|\([^()]*\))*\)"
_FUNCTION = re.compile(rf"\s*\.(entry|func)\b(?:\s*\.(?:noreturn|attribute\s*{_ATTRIBUTES}))*")
_IDENTIFIER = re.compile(r"\s*([%$_A-Za-z][\w$%]*)", re.ASCII)
_SPACE = re.compile(r"\s*\.(reg|param|shared|global|local|const|tex|sreg)\b(?:::\w+)?")
_SPECIFIER = re.compile(
    rf"\s*\.(align|ptr|attribute|[a-zA-Z]\w*(?:::\w+)?)\b(?:\s*{_ATTRIBUTES}|\s+(\d{{1,9}})\b)?", re.ASCII
)
_DECLARED = re.compile(r"\s*([%$_A-Za-z][\w$%]*)\s*(?:<\s*(\d{1,9})\s*>)?((?:\s*\[[^\]]*\])*)\s*", re.ASCII)
_TUNING = re.compile(
    r"\s*(\.pragma(?=[\s\"])[^;\"]*(?:\"[^\"\n]*\"[^;\"]*)*;|\.[a-zA-Z]\w*(?:\s*(?:\"[^\"\n]*\"|[0-9]\w*|,))*)",
    re.ASCII,
)
_OTHER_DIRECTIVE = re.compile(
    r"\s*\.(?:alias|pragma|tex\w*|samplerref|surfref|metadata)\b(?:[^;{}\"]++|\"[^\"\n]*+\")*+;"
)
_OPCODE_PART = re.compile(r"\s*(\.[\w:.]+)", re.ASCII)
_LABEL_RANGE = re.compile(r"([%$_A-Za-z][\w$%]*?)<\s*(\d{1,4})\s*>", re.ASCII)
_SCALAR_INITIALISER = re.compile(r"\s*([^{};,\"=\s][^{};,\"=]*)(?=[;,])")
_INITIALISER_PIECE = re.compile(r"[\w\s$%.+\-*/()<>&|^~!?:=,]+|([{};])", re.ASCII)
_TYPE_BITS = re.compile(r"(?:[busfe]|bf|tf)(\d+)(x\d+)?")

_NESTING_LIMIT = 200  # compilers nest a handful of scopes; deeper text is not worth the stack
_HANDLE_BYTES = 8  # textures, samplers and surfaces are passed as 64-bit handles


def parse_module(text: str, name: str = "<ptx>") -> Module:
    """Parse PTX. ``name`` is how messages call the file.

    Raises PtxSyntaxError with file, line, column and what was expected.
    """
    with _collector_paused():
        return _Parser(Source(text, name), text).module()


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Without the search for cycles: a syntax tree has none, and walking the trees parsed so far again and again
    would cost a third of the time."""
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()


def type_bytes(type_name: str) -> int:
    """Bytes of a fundamental type without its dot (``u32`` gives 4); 8 for the opaque handle types."""
    if type_name == "pred":
        return 1
    match = _TYPE_BITS.fullmatch(type_name)
    if match is None:
        return _HANDLE_BYTES
    lanes = int(match[2][1:]) if match[2] and type_name[:2] not in ("e4", "e5", "e2", "e3") else 1
    return max(1, int(match[1]) * lanes // 8)


class _Parser:
    def __init__(self, source: Source, original: str) -> None:
        self.source = source
        self.text = source.text
        self.original = original
        self.at = 0

    def module(self) -> Module:
        version = target = ""
        address_bits = 32
        functions: list[Function] = []
        variables: list[Declaration] = []
        while not self._at_end():
            if match := _HEADER.match(self.text, self.at):
                self.at = match.end()
                if match[1]:
                    version = match[1]
                elif match[2]:
                    target = match[2]
                else:
                    address_bits = int(match[3])
                continue
            if match := _DEBUG_LINE.match(self.text, self.at):
                self.at = match.end()
                continue
            if not version:
                raise self.source.error(self._here(), "a .version directive")
            if match := _SECTION.match(self.text, self.at):
                self._skip_section(match.end())
                continue
            start = self._here()
            linkage = _LINKAGE.match(self.text, self.at)
            self.at = linkage.end() if linkage else self.at
            if _FUNCTION.match(self.text, self.at):
                functions.append(self._function())
            elif _SPACE.match(self.text, self.at):
                variables.extend(self._declarations())
            elif match := _OTHER_DIRECTIVE.match(self.text, self.at):
                self.at = match.end()
            else:
                raise self.source.error(start, "a directive, variable or function")
        if not version:
            raise self.source.error(0, "a .version directive")
        return Module(
            name=self.source.name,
            text=self.original,
            version=version,
            target=target,
            address_bits=address_bits,
            functions=tuple(functions),
            variables=tuple(variables),
            newlines=self.source.newlines,
        )

    def _here(self) -> int:
        match = _SKIP.match(self.text, self.at)
        return match.end() if match else self.at

    def _at_end(self) -> bool:
        return self._here() >= len(self.text)

    def _expect(self, symbol: str) -> int:
        here = self._here()
        if not self.text.startswith(symbol, here):
            raise self.source.error(here, repr(symbol))
        self.at = here + len(symbol)
        return here

    def _skip_section(self, start: int) -> None:
        end = self.text.find("}", start)
        if end < 0:
            raise self.source.error(len(self.text), "'}' at the end of the section")
        self.at = end + 1

    def _function(self) -> Function:
        head = _FUNCTION.match(self.text, self.at)
        assert head is not None
        at, self.at = self._here(), head.end()
        results: tuple[Declaration, ...] = ()
        if self.text.startswith("(", self._here()):
            results = self._parameters()
        name = _IDENTIFIER.match(self.text, self.at)
        if name is None:
            raise self.source.error(self._here(), "the name of the function")
        self.at = name.end()
        parameters = self._parameters() if self.text.startswith("(", self._here()) else ()
        directives: list[str] = []
        while match := _TUNING.match(self.text, self.at):
            directives.append(match[1].strip())
            self.at = match.end()
        here = self._here()
        body: Block | None = None
        if self.text.startswith(";", here):
            self.at = here + 1
        elif self.text.startswith("{", here):
            self.at = here + 1
            body = self._body(here)
        else:
            raise self.source.error(here, "'{' or ';' after the head of the function")
        return Function(
            name=name[1],
            is_entry=head[1] == "entry",
            parameters=parameters,
            results=results,
            directives=tuple(directives),
            body=body,
            at=at,
        )

    def _parameters(self) -> tuple[Declaration, ...]:
        self._expect("(")
        found: list[Declaration] = []
        while not self.text.startswith(")", self._here()):
            if not _SPACE.match(self.text, self.at):
                raise self.source.error(self._here(), "a .param or .reg declaration")
            found.append(self._declaration_head())
            if self.text.startswith(",", self._here()):
                self._expect(",")
            elif not self.text.startswith(")", self._here()):
                raise self.source.error(self._here(), "',' or ')'")
        self._expect(")")
        return tuple(found)

    def _specifiers(self) -> tuple[str, str, int, int, int]:
        """Space, type, vector lanes, alignment and offset of a declaration, up to its first name."""
        space = _SPACE.match(self.text, self.at)
        assert space is not None
        at, self.at = self._here(), space.end()
        type_name, lanes, alignment = "", 1, 0
        while match := _SPECIFIER.match(self.text, self.at):
            word = match[1]
            self.at = match.end() if word in ("align", "attribute") else match.end(1)
            if word == "align":
                # `.ptr .align N` speaks of what is pointed to, not of the parameter itself
                alignment = alignment if alignment < 0 else int(match[2] or 0)
            elif word == "ptr":
                alignment = -1
            elif word in ("v2", "v4", "v8"):
                lanes = int(word[1:])
            elif word not in (
                "attribute",
                "unified",
                "managed",
                "global",
                "shared",
                "local",
                "const",
                "surfref",
            ):
                type_name = word
        if not type_name:
            raise self.source.error(self._here(), "a type such as .b32")
        return space[1], type_name, lanes, max(0, alignment), at

    def _declared(self, specifiers: tuple[str, str, int, int, int]) -> Declaration:
        space, type_name, lanes, alignment, at = specifiers
        match = _DECLARED.match(self.text, self.at)
        if match is None:
            raise self.source.error(self._here(), "a name")
        self.at = match.end()
        item = type_bytes(type_name) * lanes
        total = item
        for extent in re.findall(r"\[([^\]]*)\]", match[3]):
            count = parse_integer(extent.strip()) if extent.strip() else 0
            if count is None or count < 0:
                raise self.source.error(self.at, "an array extent")
            total *= count
        return Declaration(
            space=space,
            type=type_name,
            name=match[1],
            alignment=alignment or item,
            bytes=total,
            count=int(match[2]) if match[2] else None,
            at=at,
        )

    def _declaration_head(self) -> Declaration:
        return self._declared(self._specifiers())

    def _declarations(self) -> list[Declaration]:
        """A declaration statement with its initialisers, up to and with the semicolon."""
        specifiers = self._specifiers()
        found = [self._declared(specifiers)]
        while True:
            here = self._here()
            symbol = self.text[here : here + 1]
            if symbol == ";":
                self.at = here + 1
                return found
            if symbol == "=" and not found[-1].initial:
                found[-1] = replace(found[-1], initial=self._initialiser(here + 1))
            elif symbol == ",":
                self.at = here + 1
                found.append(self._declared(specifiers))
            else:
                raise self.source.error(here, "',', '=' or ';'")

    def _initialiser(self, start: int) -> str:
        """Values, addresses and nested braces after an equals sign, up to the comma or semicolon that ends them."""
        text = self.text
        if match := _SCALAR_INITIALISER.match(text, start):
            self.at = match.end()
            return match[1].strip()
        depth, at = 0, start
        while match := _INITIALISER_PIECE.match(text, at):
            symbol = match[1]
            if symbol == ";":
                break
            at = match.end()
            depth += 1 if symbol == "{" else -1 if symbol == "}" else 0
            if symbol == "}" and depth == 0:
                self.at = at
                return text[start:at].strip()
            if depth <= 0 and (symbol or not match[0].isspace()):
                break
        raise self.source.error(
            at, "a value" if not text[start:at].strip() else "the rest of the initialiser"
        )

    def _body(self, opened: int) -> Block:
        """Everything up to the brace that closes the function; the cursor is just inside the opening one."""
        source, text, statement = self.source, self.text, _STATEMENT
        stack: list[tuple[int, list[Item]]] = []
        items: list[Item] = []
        while True:
            match = statement.match(text, self.at)
            if match is None:
                here = self._here()
                raise source.error(here, "an instruction, label, directive or '}'")
            group = match.lastindex
            if group == 4 or group == 5 or group == 6:
                operands = match[5] if group == 5 else match[6] if group == 6 else None
                guard, opcode, start = match[3], match[4], match.start(group)
                at = match.start(4)
                if operands and operands.lstrip()[:1] == ".":  # written apart: ld .global .u32
                    opcode, operands, start = _joined(opcode, operands, start)
                parsed = source.operand_list(operands, start) if operands and operands.strip() else ()
                negated = guard is not None and guard[0] == "!"
                items.append(
                    Instruction(
                        None if guard is None else Guard(guard[1:].strip() if negated else guard, negated),
                        opcode,
                        parsed,
                        at,
                    )
                )
            elif group == 1:
                items.append(Label(match[1], match.start(1)))
            elif group == 2:
                if match[2] == "{":
                    if len(stack) >= _NESTING_LIMIT:
                        raise source.error(match.start(2), "fewer nested scopes")
                    stack.append((match.start(2), items))
                    items = []
                elif not stack:
                    self.at = match.end()
                    return Block(tuple(items), opened)
                else:
                    at, outer = stack.pop()
                    outer.append(Block(tuple(items), at))
                    items = outer
            elif group == 8:
                written = match[8]
                if _SPACE.match(written):
                    self.at = match.start(8)
                    items.extend(self._declarations())
                    continue
                if written.startswith(".branchtargets"):
                    written = _LABEL_RANGE.sub(_labels, written)
                items.append(Directive(written.split(None, 1)[0], written, match.start(8)))
            self.at = match.end()


def _joined(opcode: str, operands: str, start: int) -> tuple[str, str, int]:
    """An opcode whose modifiers stand apart from it, the operands after them, and the offset of these."""
    at = 0
    while match := _OPCODE_PART.match(operands, at):
        opcode += match[1]
        at = match.end()
    return opcode, operands[at:], start + at


def _labels(match: re.Match[str]) -> str:
    return ", ".join(f"{match[1]}{index}" for index in range(int(match[2])))
