"""A scalar emulator of the integer part of PTX, one thread at a time: an oracle for the analysis that shares only
the parser with it. Floating-point results, shuffles and shared memory read as zero; no address of the stored
kernels depends on them (`scatter_add`, which passes pointers through shared memory, is checked differently).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tessera_core.ptx.analysis import LaunchShape
from tessera_core.ptx.syntax import (
    Address,
    Block,
    Declaration,
    Function,
    Immediate,
    Instruction,
    Label,
    Module,
    Name,
    Operand,
    Vector,
)
from tests.ptx.reference import INSTRUCTIONS

_SPACING = 1 << 36  # between the made-up addresses of two buffers
_STEPS_LIMIT = 200_000


@dataclass
class Observation:
    """Marks per byte of each buffer, set where some thread read or wrote it."""

    read: dict[int, npt.NDArray[np.bool_]] = field(default_factory=dict)
    written: dict[int, npt.NDArray[np.bool_]] = field(default_factory=dict)


def observe(
    module: Module, launch: LaunchShape, memory: Mapping[int, bytes], seen: Observation | None = None
) -> Observation:
    """Run all threads of ``launch`` on buffers with the given contents, marking in ``seen`` where it is given."""
    seen = seen or Observation(
        {buffer: np.zeros(len(content), dtype=np.bool_) for buffer, content in memory.items()},
        {buffer: np.zeros(len(content), dtype=np.bool_) for buffer, content in memory.items()},
    )
    function = next(f for f in module.entries() if f.name == launch.entry)
    code = _Code(function)
    parameters = bytearray(launch.parameters)
    for relocation in launch.relocations:
        address = (relocation.buffer + 1) * _SPACING + relocation.byte_offset
        parameters[relocation.offset : relocation.offset + 8] = address.to_bytes(8, "little")
    gx, gy, gz = launch.grid
    bx, by, bz = launch.block
    for block in np.ndindex(gz, gy, gx):
        for thread in np.ndindex(bz, by, bx):
            special = {
                **{f"%ctaid.{axis}": int(block[2 - i]) for i, axis in enumerate("xyz")},
                **{f"%tid.{axis}": int(thread[2 - i]) for i, axis in enumerate("xyz")},
                **{f"%ntid.{axis}": launch.block[i] for i, axis in enumerate("xyz")},
                **{f"%nctaid.{axis}": launch.grid[i] for i, axis in enumerate("xyz")},
            }
            _Thread(code, bytes(parameters), special, memory, seen).run()
    return seen


class _Code:
    def __init__(self, function: Function) -> None:
        assert function.body is not None
        self.offsets = function.parameter_offsets()
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.widths: dict[str, int] = {}
        self._add(function.body)

    def _add(self, block: Block) -> None:
        for item in block.items:
            if isinstance(item, Instruction):
                self.instructions.append(item)
            elif isinstance(item, Label):
                self.labels[item.name] = len(self.instructions)
            elif isinstance(item, Block):
                self._add(item)
            elif isinstance(item, Declaration) and item.space == "reg":
                self.widths[item.name] = int(item.type[1:]) if item.type != "pred" else 1


def _bits(kind: str) -> int:
    digits = kind[1:].rstrip("abcdefghijklmnopqrstuvwxyz")
    return int(digits) if kind[0] in "busf" and digits.isdigit() else 32


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


class _Thread:
    """Registers hold unsigned bit patterns."""

    def __init__(
        self,
        code: _Code,
        parameters: bytes,
        special: Mapping[str, int],
        memory: Mapping[int, bytes],
        seen: Observation,
    ) -> None:
        self.code, self.parameters, self.special, self.memory, self.seen = (
            code,
            parameters,
            special,
            memory,
            seen,
        )
        self.registers: dict[str, int] = {}

    def run(self) -> None:
        at = 0
        for _ in range(_STEPS_LIMIT):
            if at >= len(self.code.instructions):
                return
            step = self.code.instructions[at]
            at += 1
            if (
                step.guard is not None
                and bool(self.registers.get(step.guard.register, 0)) == step.guard.negated
            ):
                continue
            parts = step.opcode.split(".")
            if parts[0] in ("ret", "exit"):
                return
            if parts[0] == "bra":
                target = step.operands[0]
                assert isinstance(target, Name)
                at = self.code.labels[target.text]
            else:
                self._execute(parts, step.operands)
        raise AssertionError("the thread does not end")

    def _execute(self, parts: list[str], operands: tuple[Operand, ...]) -> None:
        if parts[0] in ("ld", "st", "atom", "red"):
            self._memory(parts, operands)
        elif parts[0] == "cp" and parts[1] == "async" and len(operands) >= 3:
            size = self._value(operands[3] if len(operands) > 3 else operands[2])
            self._mark(self.seen.read, self._value(operands[1]), size)
        elif operands and isinstance(operands[0], (Name, Vector)):
            self._compute(parts, operands)

    def _memory(self, parts: list[str], operands: tuple[Operand, ...]) -> None:
        lanes = next((int(p[1:]) for p in parts if p in ("v2", "v4", "v8")), 1)
        size = max(1, _bits(parts[-1]) // 8)
        where = operands[0] if parts[0] in ("st", "red") else operands[1]
        private = {"shared", "local", "shared::cta"} & set(parts)
        address = self._value(where)
        if parts[0] in ("st", "red", "atom") and not private and "param" not in parts:
            if parts[0] != "st":
                self._mark(self.seen.read, address, size)
            self._mark(self.seen.written, address, size * lanes)
        if parts[0] not in ("ld", "atom"):
            return
        targets = operands[0].elements if isinstance(operands[0], Vector) else (operands[0],)
        for lane, target in enumerate(targets):
            value = 0
            if "param" in parts:
                start = address + lane * size
                value = int.from_bytes(self.parameters[start : start + size], "little")
            elif not private:
                if parts[0] == "ld":
                    self._mark(self.seen.read, address + lane * size, size)
                buffer, start = divmod(address + lane * size, _SPACING)
                value = int.from_bytes(self.memory[buffer - 1][start : start + size], "little")
            if parts[-1][0] == "s":
                value = _signed(value, size * 8)
            assert isinstance(target, Name)
            self._set(target.text, value)

    def _mark(self, marks: dict[int, npt.NDArray[np.bool_]], address: int, size: int) -> None:
        buffer, start = divmod(address, _SPACING)
        assert start + size <= len(marks[buffer - 1]), "the launch itself leaves its buffer"
        marks[buffer - 1][start : start + size] = True

    def _width(self, name: str) -> int:
        return self.code.widths.get(name) or self.code.widths.get(name.rstrip("0123456789"), 64)

    def _set(self, name: str, value: int) -> None:
        self.registers[name] = value & ((1 << self._width(name)) - 1)

    def _value(self, operand: Operand) -> int:
        if isinstance(operand, Name):
            if operand.text in self.special:
                return self.special[operand.text]
            if operand.text in self.code.offsets:
                return self.code.offsets[operand.text]
            return self.registers.get(operand.text, 0)
        if isinstance(operand, Immediate):
            return operand.value or 0
        if isinstance(operand, Address):
            return self._value(operand.base) + operand.offset
        return 0

    def _compute(self, parts: list[str], operands: tuple[Operand, ...]) -> None:
        target, sources = operands[0], operands[1:]
        kind, bits = parts[-1], _bits(parts[-1])
        if parts[0] == "mov" and (isinstance(target, Vector) or isinstance(sources[0], Vector)):
            self._repack(target, sources[0], bits)
            return
        names = list(target.elements) if isinstance(target, Vector) else [target]
        result = 0
        if kind[0] != "f" and "f32" not in parts and "bf16" not in parts and "f16" not in parts:
            raw = [self._value(operand) for operand in sources]
            result = self._integer(parts, kind, bits, raw)
        for name in names:
            if isinstance(name, Name):
                self._set(name.text, result)

    def _repack(self, target: Operand, source: Operand, bits: int) -> None:
        if isinstance(source, Vector):
            piece = bits // len(source.elements)
            mask = (1 << piece) - 1
            joined = sum((self._value(e) & mask) << (i * piece) for i, e in enumerate(source.elements))
            assert isinstance(target, Name)
            self._set(target.text, joined)
            return
        assert isinstance(target, Vector)
        value, piece = self._value(source), bits // len(target.elements)
        for index, element in enumerate(target.elements):
            if isinstance(element, Name):
                self._set(element.text, (value >> (index * piece)) & ((1 << piece) - 1))

    def _integer(self, parts: list[str], kind: str, bits: int, raw: list[int]) -> int:
        name = parts[0]
        mask = (1 << bits) - 1
        typed = [_signed(v, bits) if kind[0] == "s" else v & mask for v in raw]
        if name in ("mov", "cvta"):
            return raw[0]
        if name in ("add", "sub"):
            return raw[0] + raw[1] if name == "add" else raw[0] - raw[1]
        if name in ("mul", "mad"):
            product = typed[0] * typed[1]
            if "hi" in parts:
                product >>= bits
            return product + (raw[2] if name == "mad" else 0)
        if name == "shl":
            return raw[0] << min(raw[1], 64)
        if name == "shr":
            return typed[0] >> min(raw[1] & 0xFFFFFFFF, 64)
        if name in ("and", "or", "xor"):
            return {"and": raw[0] & raw[1], "or": raw[0] | raw[1], "xor": raw[0] ^ raw[1]}[name]
        if name == "not":
            return (1 - raw[0]) if kind == "pred" else ~raw[0]
        if name == "neg":
            return -raw[0]
        if name == "abs":
            return abs(typed[0])
        if name in ("min", "max"):
            return min(typed[:2]) if name == "min" else max(typed[:2])
        if name in ("div", "rem"):
            if typed[1] == 0:
                return 0
            quotient = abs(typed[0]) // abs(typed[1])
            quotient = -quotient if (typed[0] < 0) != (typed[1] < 0) else quotient
            return quotient if name == "div" else typed[0] - quotient * typed[1]
        if name == "cvt":
            origin = parts[-1]
            value = (
                _signed(raw[0], _bits(origin)) if origin[0] == "s" else raw[0] & ((1 << _bits(origin)) - 1)
            )
            return value & ((1 << _bits(parts[-2])) - 1) if parts[-2][0] != "s" else value
        if name == "bfe":
            length = raw[2] & 0xFF
            field_bits = (raw[0] & mask) >> (raw[1] & 0xFF) & ((1 << length) - 1)
            return _signed(field_bits, length) if kind[0] == "s" and length else field_bits
        if name == "selp":
            return raw[0] if raw[2] else raw[1]
        if name == "setp":
            return self._compare(parts, bits, raw)
        row = INSTRUCTIONS.get(".".join(parts))
        if row is not None:
            return row.compute(
                *(v & ((1 << w) - 1) if w else v for v, w in zip(raw, row.sources, strict=True))
            )
        return 0

    @staticmethod
    def _compare(parts: list[str], bits: int, raw: list[int]) -> int:
        mask = (1 << bits) - 1
        comparison = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(parts[1], parts[1])
        is_signed = parts[-1][0] == "s"
        x, y = ((_signed(v, bits) if is_signed else v & mask) for v in raw[:2])
        holds = {"eq": x == y, "ne": x != y, "lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y}[comparison]
        if len(raw) > 2:
            third = bool(raw[2])
            holds = (
                (holds or third)
                if "or" in parts
                else (holds != third)
                if "xor" in parts
                else (holds and third)
            )
        return int(holds)
