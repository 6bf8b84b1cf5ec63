"""What the kernels of one PTX module touch, asked without a trace: in terms of parameters and indices, and exactly
where a launch is given.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tessera_core.program.boxes import Box
from tessera_core.ptx.analysis import LaunchShape, Relocation, analyse_launch
from tessera_core.ptx.parser import parse_module
from tessera_core.ptx.summary import EntrySummary, ParameterSummary, summarise
from tessera_core.ptx.syntax import Module
from tessera_core.report.facts import Facts, FactTable
from tessera_formats.errors import InputError
from tessera_formats.files import read_file

BOXES_SHOWN = 4
"""Boxes of one access that a table shows; the JSON facts have all."""

_FLOATS = {"f32": "<f", "f64": "<d", "f16": "<e"}

Extent = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Argument:
    """A parameter's bytes, or where ``allocation`` is not None, a pointer ``offset`` bytes into one of so many."""

    content: bytes
    allocation: int | None = None
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleStage:
    """The kernels of a module; ``entry`` None: all of them.

    With ``grid`` the launch of one kernel is analysed too; ``block`` None: the one that the kernel requires.
    ``arguments``: texts ``PARAMETER=KIND:VALUE``, as :func:`parse_argument` takes them.
    """

    entry: str | None = None
    grid: Extent | None = None
    block: Extent | None = None
    shared_bytes: int = 0
    arguments: tuple[str, ...] = ()

    def run(self, path: Path | str) -> Facts:
        """Analyse the module at ``path`` (``-``: standard input).

        Raises PtxSyntaxError with file, line and column for what is not PTX, and InputError for a kernel that the
        module lacks, or a launch that does not fit it.
        """
        name = "standard input" if str(path) == "-" else str(path)
        module = parse_module(read_file(path).decode("utf-8", errors="replace"), name)
        names = [function.name for function in module.entries()]
        if not names:
            raise InputError(f"{name}: has no kernel (.entry with a body)")
        chosen = names if self.entry is None else [self.entry]
        summaries = [summarise(module, entry) for entry in chosen]
        values = {"module": name, "version": module.version, "target": module.target, "kernels": len(chosen)}
        tables = [_parameters(summaries), _sites(summaries), _fallbacks(summaries)]
        if self.grid is not None:
            if len(chosen) != 1:
                raise InputError(f"{name}: has {len(names)} kernels; name the one to launch with --entry")
            tables.extend(self._launched(module, summaries[0], self.grid))
        elif self.block is not None or self.arguments:
            raise InputError("a launch needs --grid too, for example --grid 128")
        return Facts("what a module's kernels touch", values, tuple(t for t in tables if t.rows))

    def _launched(self, module: Module, summary: EntrySummary, grid: Extent) -> list[FactTable]:
        block = self.block or summary.block
        if block is None:
            raise InputError(f"{module.name}: {summary.entry} does not say its block; add --block X,Y,Z")
        function = next(f for f in module.entries() if f.name == summary.entry)
        offsets = function.parameter_offsets()
        given = _matched(summary, self.arguments, module.name)
        content = bytearray(function.parameter_bytes())
        relocations: list[Relocation] = []
        sizes: dict[int, int] = {}
        for parameter in summary.parameters:
            argument = given.get(parameter.index)
            at = offsets[parameter.name]
            if argument is None:
                if parameter.used:
                    raise InputError(
                        f"{module.name}: {summary.entry} uses parameter {parameter.index} ({parameter.name},"
                        f" {parameter.type}); give it with --arg {parameter.index}={_example(parameter)}"
                    )
            elif argument.allocation is not None:
                if parameter.bytes != 8:
                    raise InputError(
                        f"--arg {parameter.index}: {parameter.name} has {parameter.bytes} bytes, a pointer has 8;"
                        " give its bytes as hex:..."
                    )
                relocations.append(Relocation(at, parameter.index, argument.offset))
                sizes[parameter.index] = argument.allocation
            else:
                if len(argument.content) > parameter.bytes:
                    raise InputError(
                        f"--arg {parameter.index}: {parameter.name} has {parameter.bytes} bytes, not"
                        f" {len(argument.content)}; give a value of its type, {parameter.type}"
                    )
                content[at : at + len(argument.content)] = argument.content
        shape = LaunchShape(
            entry=summary.entry,
            grid=grid,
            block=block,
            shared_bytes=self.shared_bytes,
            parameters=bytes(content),
            relocations=tuple(relocations),
        )
        found = analyse_launch(module, shape, sizes)
        rows = tuple(
            (
                summary.entry,
                summary.parameters[access.buffer].short,
                access.mode,
                "must" if access.must and access.mode == "write" else "may",
                _shown(access.boxes, sizes[access.buffer]),
                access.precision,
                access.line,
                access.reason,
            )
            for access in found.accesses
        )
        split = found.split
        unsafe = [
            f"module variable {name} is written (line {line})" for name, line in found.written_variables
        ]
        notes = tuple((summary.entry, reason) for reason in (*found.fallbacks, *unsafe))
        return [
            FactTable(
                "accesses of the launch",
                ("kernel", "parameter", "mode", "certainty", "bytes", "precision", "line", "reason"),
                rows,
            ),
            FactTable(
                "blocks",
                ("kernel", "blocks", "independent", "reason"),
                ((summary.entry, split.blocks, split.independent, split.reason),),
            ),
            FactTable("fallbacks of the launch", ("kernel", "reason"), notes),
        ]


def parse_argument(text: str) -> tuple[str, Argument]:
    """``PARAMETER=KIND:VALUE`` as (index or name, argument).

    Kinds: ``ptr:BYTES`` (an allocation of so many bytes) or ``ptr:BYTES+OFFSET``; ``i8`` to ``i64`` and ``u8`` to
    ``u64``; ``f16``, ``f32``, ``f64``; ``hex:`` and the bytes in the order of memory. Raises InputError.
    """
    place, _, value = text.partition("=")
    kind, _, number = value.partition(":")
    problem = InputError(
        f"--arg {text}: expected PARAMETER=KIND:VALUE, such as 0=ptr:4096, 1=i32:128, 2=f32:1.5 or 3=hex:0a00"
    )
    if not place or not number:
        raise problem
    try:
        if kind == "ptr":
            size, _, offset = number.partition("+")
            argument = Argument(b"", int(size, 0), int(offset or "0", 0))
            if argument.allocation is None or argument.allocation < 0 or argument.offset < 0:
                raise problem
            return place, argument
        if kind in _FLOATS:
            return place, Argument(struct.pack(_FLOATS[kind], float(number)))
        if kind == "hex":
            return place, Argument(bytes.fromhex(number))
        if kind[:1] in ("i", "u") and kind[1:] in ("8", "16", "32", "64"):
            signed = kind[0] == "i"
            return place, Argument(int(number, 0).to_bytes(int(kind[1:]) // 8, "little", signed=signed))
    except (ValueError, OverflowError, struct.error):
        raise problem from None
    raise problem


def _matched(summary: EntrySummary, texts: Sequence[str], name: str) -> dict[int, Argument]:
    """Arguments by parameter index."""
    indices = {parameter.name: parameter.index for parameter in summary.parameters}
    shorts = {parameter.short: parameter.index for parameter in summary.parameters}
    found: dict[int, Argument] = {}
    for text in texts:
        place, argument = parse_argument(text)
        index = int(place) if place.isdigit() else {**indices, **shorts}.get(place, -1)
        if not 0 <= index < len(summary.parameters):
            raise InputError(
                f"{name}: {summary.entry} has no parameter {place}; it has 0 to {len(summary.parameters) - 1}:"
                f" {', '.join(indices)}"
            )
        if index in found:
            raise InputError(f"--arg {text}: parameter {index} is given twice")
        found[index] = argument
    return found


def _example(parameter: ParameterSummary) -> str:
    if parameter.pointer:
        return "ptr:BYTES"
    if parameter.type[:1] == "f":
        return f"{parameter.type}:VALUE"
    return f"i{8 * parameter.bytes}:VALUE" if parameter.bytes in (1, 2, 4, 8) else "hex:BYTES"


def _shown(boxes: Sequence[Box] | None, allocation: int) -> str:
    if boxes is None:
        return f"all {allocation}"
    texts = [_box(box) for box in boxes[:BOXES_SHOWN]]
    more = f", and {len(boxes) - BOXES_SHOWN} more" if len(boxes) > BOXES_SHOWN else ""
    return ", ".join(texts) + more


def _box(box: Box) -> str:
    """``[0, 512)``, and for each further axis how often and how far apart."""
    rows = "".join(f" x{count} every {stride}" for count, stride in box.dims)
    return f"[{box.start}, {box.start + box.run}){rows}"


def _parameters(summaries: Sequence[EntrySummary]) -> FactTable:
    rows = tuple(
        (
            summary.entry,
            parameter.index,
            parameter.name,
            parameter.short,
            f".{parameter.type}" if parameter.bytes <= 8 else f".{parameter.type} x{parameter.bytes}",
            "pointer" if parameter.pointer else "value" if parameter.used else "unused",
            ", ".join(word for word, so in (("read", parameter.read), ("written", parameter.written)) if so),
        )
        for summary in summaries
        for parameter in summary.parameters
    )
    return FactTable("parameters", ("kernel", "index", "name", "called", "type", "is", "accessed"), rows)


def _sites(summaries: Sequence[EntrySummary]) -> FactTable:
    rows = tuple(
        (
            summary.entry,
            site.parameter or "?",
            site.mode,
            site.bytes,
            site.at,
            "form" if site.bounded else "allocation" if site.parameter else "nothing",
            site.condition,
            site.line,
        )
        for summary in summaries
        for site in summary.sites
    )
    return FactTable(
        "accesses", ("kernel", "parameter", "mode", "bytes", "at", "bounded by", "if", "line"), rows
    )


def _fallbacks(summaries: Sequence[EntrySummary]) -> FactTable:
    rows = tuple((summary.entry, line, why) for summary in summaries for line, why in summary.fallbacks)
    return FactTable("fallbacks", ("kernel", "line", "reason"), rows)


def parse_extent(option: str, text: str) -> Extent:
    """``X``, ``X,Y`` or ``X,Y,Z``, each at least 1. Raises InputError."""
    parts = text.split(",")
    if not 1 <= len(parts) <= 3 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise InputError(f"{option} {text}: expected X, X,Y or X,Y,Z, each a whole number of at least 1")
    x, y, z = (*(int(part) for part in parts), 1, 1)[:3]
    return x, y, z
