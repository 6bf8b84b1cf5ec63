"""Reads PTX text into flat lists of instructions, by regular expressions and nothing else: what the emulator needs of
a module that ptxas has accepted, so it checks no syntax. Not related to the product's parser, on purpose.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

SIZES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16, "pred": 1}

_COMMENTS = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
_HEAD = re.compile(r"(?:\.visible|\.weak|\.extern|\.entry|\.func|\.common|\s)+")
_LABEL = re.compile(r"^\s*([\w$]+)\s*:(?!:)")
_OPERANDS = re.compile(r"\s*(?:\{[^}]*\}|\[[^\]]*\]|\([^)]*\))|[^,]+")
_VARIABLE = re.compile(
    r"\.(?P<space>global|const|shared|local|param)\s+(?:\.attribute\([^)]*\)\s*)?(?:\.align\s+(?P<align>\d+)\s+)?"
    r"\.(?P<type>\w+)\s+(?:\.ptr\s*(?:\.(?!align)\w+\s*)*(?:\.align\s+\d+)?\s*)?(?P<name>[\w$%]+)\s*(?:\[(?P<count>\d*)\])?"
)


@dataclass(frozen=True)
class Step:
    """One instruction: guard register ("" for none) and its sense, opcode parts, operand texts."""

    guard: str
    negated: bool
    parts: tuple[str, ...]
    operands: tuple[str, ...]
    scope: str
    line: int


@dataclass
class Variable:
    """Bytes of a declared variable; ``content`` where it has an initialiser."""

    name: str
    size: int
    align: int
    content: bytes | None = None
    space: str = ""


@dataclass
class Routine:
    """A kernel or function: parameters with offsets, results, body as steps, labels, variables."""

    name: str
    kernel: bool
    parameters: dict[str, tuple[int, int]] = field(default_factory=dict)
    results: dict[str, tuple[int, int]] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)
    shared: list[Variable] = field(default_factory=list)
    local: list[Variable] = field(default_factory=list)
    params: list[Variable] = field(default_factory=list)


@dataclass
class Program:
    """The routines and module variables of a text."""

    routines: dict[str, Routine]
    variables: list[Variable]


def read(text: str) -> Program:
    """The whole module. Function bodies are found by their braces."""
    text = _COMMENTS.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    program = Program({}, [])
    at = 0
    starts = re.compile(
        r"\.(entry|func)\b|^\s*(?:\.(?:visible|weak|extern|common)\s+)*\.(global|const|shared)\b[^;]*;", re.M
    )
    while (found := starts.search(text, at)) is not None:
        if found[2]:
            program.variables.extend(_variables(found[0]))
            at = found.end()
            continue
        at = _routine(program, text, found.end(), found[1] == "entry")
    return program


def _routine(program: Program, text: str, at: int, kernel: bool) -> int:
    results = ""
    found = re.compile(r"\s*(\([^)]*\))?\s*([\w$]+)\s*(\([^)]*\))?").match(text, at)
    assert found is not None
    results = found[1] or ""
    routine = Routine(found[2], kernel)
    routine.results = _layout(results)
    routine.parameters = _layout(found[3] or "")
    brace, semicolon = text.find("{", found.end()), text.find(";", found.end())
    if brace < 0 or 0 <= semicolon < brace:  # a declaration only
        return semicolon + 1
    depth, end = 1, brace + 1
    while depth:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    _body(routine, text[brace + 1 : end - 1], text.count("\n", 0, brace + 1) + 1)
    program.routines[routine.name] = routine
    return end


def _layout(text: str) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    at = 0
    for variable in _VARIABLE.finditer(text):
        size, align = _extent(variable)
        at += -at % align
        found[variable["name"]] = (at, size)
        at += size
    return found


def _extent(variable: re.Match[str]) -> tuple[int, int]:
    item = SIZES[re.sub(r"^[a-z]+(?=\d)", "", variable["type"])]
    size = item * (int(variable["count"]) if variable["count"] else 1)
    return (size if variable["count"] != "" else 0), int(variable["align"] or item)


def _variables(statement: str) -> list[Variable]:
    found = _VARIABLE.search(statement)
    if found is None:
        return []
    size, align = _extent(found)
    content = None
    values = re.search(r"=\s*\{(.*)\}|=\s*([^;{]+);", statement, re.S)
    if values is not None:
        item = SIZES[re.sub(r"^[a-z]+(?=\d)", "", found["type"])]
        try:
            numbers = [number(v.strip()) for v in (values[1] or values[2]).split(",")]
            content = b"".join((n & ((1 << item * 8) - 1)).to_bytes(item, "little") for n in numbers)
        except ValueError:  # an address: no stored kernel's addresses depend on one
            content = None
    return [Variable(found["name"], size, align, content, found["space"])]


def _body(routine: Routine, body: str, line: int) -> None:
    scope: list[int] = [0]
    scopes = 0
    at = 0
    token = re.compile(r"\s*([{}]|[^;{}]*(?:\{[^{}]*\}[^;{}]*)*;)", re.S)
    while at < len(body):
        label = _LABEL.match(body[at:])
        if label is not None:
            routine.labels[_scoped(scope, label[1])] = len(routine.steps)
            line += body.count("\n", at, at + label.end())
            at += label.end()
            if re.match(r"\s*\.(branchtargets|calltargets|callprototype)", body[at:]):
                end = body.index(";", at)
                routine.tables[_scoped(scope, label[1])] = re.findall(
                    r"[\w$]+", body[at:end].split("targets", 1)[-1]
                )
                line += body.count("\n", at, end + 1)
                at = end + 1
            continue
        rest = body[at:]
        opening = re.match(r"\s*([{}])", rest)
        if opening is not None:
            if opening[1] == "{":
                scopes += 1
                scope.append(scopes)
            else:
                scope.pop()
            line += opening[0].count("\n")
            at += opening.end()
            continue
        directive = re.match(r"\s*\.(loc|file)\b[^\n]*", rest)
        if directive is not None:
            line += directive[0].count("\n")
            at += directive.end()
            continue
        found = token.match(body, at)
        if found is None:
            assert not rest.strip(), rest[:80]
            return
        lead = len(found[0]) - len(found[0].lstrip())
        line += found[0][:lead].count("\n")
        _statement(routine, " ".join(found[1][:-1].split()), ".".join(map(str, scope)), line)
        line += found[0][lead:].count("\n")
        at = found.end()


def _scoped(scope: list[int], name: str) -> str:
    return f"{'.'.join(map(str, scope))}:{name}"


def _statement(routine: Routine, text: str, scope: str, line: int) -> None:
    if text.startswith("."):
        for variable in _variables(text + ";"):
            variable.name = f"{scope}:{variable.name}"
            {"shared": routine.shared, "local": routine.local, "param": routine.params}[
                variable.space
            ].append(variable)
        return
    guard = re.match(r"@(!?)([\w$%]+)\s+", text)
    text = text[guard.end() :] if guard else text
    opcode, _, rest = text.partition(" ")
    operands = tuple(o.strip() for o in _OPERANDS.findall(rest) if o.strip())
    negated = bool(guard and guard[1])
    routine.steps.append(
        Step(guard[2] if guard else "", negated, tuple(opcode.split(".")), operands, scope, line)
    )


def number(text: str) -> int:
    """An immediate as bits; raises ValueError where it is none."""
    text = text.rstrip("U") if not text.startswith(("0f", "0F", "0d", "0D")) else text
    sign = -1 if text.startswith("-") else 1
    digits = text.lstrip("+-")
    if digits[:2].lower() in ("0f", "0d"):
        return int(digits[2:], 16)
    if digits[:2].lower() == "0x":
        return sign * int(digits, 16)
    if digits[:2].lower() == "0b":
        return sign * int(digits, 2)
    if len(digits) > 1 and digits[0] == "0" and digits.isdigit():
        return sign * int(digits, 8)
    return sign * int(digits)
