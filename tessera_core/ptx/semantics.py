"""What instructions on registers compute: one transfer function per opcode, found in :data:`TRANSFERS`. An opcode
without one gives an unknown result that may point wherever its operands do.

Source: PTX ISA 9.0, sections 9.7.1 (integer arithmetic), 9.7.6 (comparison and selection), 9.7.8 (logic and shift)
and 9.7.9 (data movement and conversion).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tessera_core.ptx import arithmetic, bits, words
from tessera_core.ptx.predicates import choose, compare
from tessera_core.ptx.values import (
    ALWAYS,
    EITHER,
    NEVER,
    Known,
    Predicate,
    Shape,
    Value,
    constant,
    is_constant,
    mixed,
    unknown,
    width_of,
)

Transfer = Callable[[Shape, tuple[str, ...], tuple[Value, ...]], Value]


def evaluate(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """The result of the instruction with opcode ``parts`` on ``sources``."""
    transfer = TRANSFERS.get(parts[0])
    if transfer is None:
        return mixed(sources)
    try:
        return transfer(shape, parts, sources)
    except (IndexError, ValueError):
        return mixed(
            sources
        )  # operands or a type that the opcode does not have: no assembler would accept it


def _constant_predicate(value: Value) -> Predicate:
    if not isinstance(value, Known) or not is_constant(value):
        return EITHER
    return Predicate(ALWAYS, NEVER) if value.low else Predicate(NEVER, ALWAYS)


def _move(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    value = sources[0]
    if parts[-1] == "pred" and not isinstance(value, Predicate):
        return _constant_predicate(value)
    return value


def _select(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """``selp``."""
    predicate = sources[2]
    return choose(shape, predicate if isinstance(predicate, Predicate) else EITHER, sources[0], sources[1])


def _select_by_sign(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """``slct``: by the sign of the third source."""
    predicate: Value = EITHER
    if parts[-1] == "s32":
        predicate = compare(shape, ("setp", "ge", "s32"), (sources[2], constant(0)))
    return _select(shape, parts, (sources[0], sources[1], predicate))


def _set(shape: Shape, parts: tuple[str, ...], sources: tuple[Value, ...]) -> Value:
    """``set``: all ones or zero by a comparison."""
    if not width_of(parts[-2]):
        return unknown(32)
    return _select(shape, parts, (constant(-1), constant(0), compare(shape, parts, sources)))


TRANSFERS: Mapping[str, Transfer] = {
    "mov": _move,
    "cvta": _move,
    "add": arithmetic.total,
    "addc": arithmetic.total,
    "sub": arithmetic.total,
    "subc": arithmetic.total,
    "mul": arithmetic.multiply,
    "mad": arithmetic.multiply_add,
    "madc": arithmetic.multiply_add,
    "mul24": arithmetic.multiply_24,
    "mad24": arithmetic.multiply_24,
    "neg": arithmetic.negate,
    "abs": arithmetic.absolute,
    "sad": arithmetic.difference,
    "dp4a": arithmetic.dot,
    "dp2a": arithmetic.dot,
    "min": arithmetic.extreme,
    "max": arithmetic.extreme,
    "div": arithmetic.divide,
    "rem": arithmetic.divide,
    "shl": bits.shift_left,
    "shr": bits.shift_right,
    "shf": bits.funnel,
    "and": bits.logic,
    "or": bits.logic,
    "xor": bits.logic,
    "not": bits.complement,
    "cnot": words.is_zero,
    "lop3": words.table_logic,
    "cvt": bits.convert,
    "bfe": bits.extract,
    "bfi": bits.insert,
    "prmt": words.permute,
    "popc": words.population,
    "clz": words.leading_zeros,
    "bfind": words.find_highest,
    "brev": words.reverse,
    "fns": words.nth_set,
    "bmsk": words.bit_mask,
    "szext": words.extend,
    "selp": _select,
    "slct": _select_by_sign,
    "set": _set,
    "setp": compare,
}
