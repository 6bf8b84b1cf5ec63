"""Whether one copy of a device function's body may stand for many of its calls at once, its variables being the frame
of all of them.

What the variables of those calls hold can be joined; where they lie can't: the variable of one call and that of
another are apart, and code that holds the addresses of both could tell. So no such address may leave the function
that declares the variable, be it through a call, a result or memory. Registers that hold one are followed regardless
of order and scope.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from tessera_core.ptx.effects import Effects, effects_of
from tessera_core.ptx.parser import type_bytes
from tessera_core.ptx.syntax import (
    Address,
    Block,
    Declaration,
    Function,
    Instruction,
    Item,
    Operand,
    registers,
)

_FRAME = frozenset({"local", "param"})
_NONE = Effects()  # of an instruction on registers


def may_be_shared(function: Function) -> bool:
    """Whether one copy of ``function`` can stand for many calls: each argument and result is a single value, and no
    address of its variables leaves it."""
    formals = (*function.parameters, *function.results)
    if function.body is None or any(formal.bytes > type_bytes(formal.type) for formal in formals):
        return False
    items = tuple(_items(function.body))
    declared = [*formals, *(item for item in items if isinstance(item, Declaration))]
    instructions = [item for item in items if isinstance(item, Instruction)]
    passed = {item.name for item in declared if item.space == "param"}
    holders = {item.name for item in declared if item.space in _FRAME}
    before = -1
    while before < len(holders):
        before = len(holders)
        for instruction in instructions:
            if effects_of(instruction.opcode) == _NONE and _any(instruction.operands[1:], holders):
                holders.update(registers(instruction.operands[0]))
    returned = {formal.name for formal in function.results} - passed
    return not returned & holders and not any(_hands_on(each, holders, passed) for each in instructions)


def _items(block: Block) -> Iterator[Item]:
    for item in block.items:
        if isinstance(item, Block):
            yield from _items(item)
        else:
            yield item


def _any(operands: Iterable[Operand], names: Collection[str]) -> bool:
    return any(name in names for operand in operands for name in registers(operand))


def _hands_on(instruction: Instruction, holders: set[str], passed: set[str]) -> bool:
    """Whether an instruction puts the address of a variable into memory, or passes it to a callee."""
    effects, operands = effects_of(instruction.opcode), instruction.operands
    if instruction.opcode.split(".")[0] == "call":
        return _any(operands, holders - passed)
    if effects == _NONE:
        return False
    addresses = {touch.operand for touch in effects.touches}
    others = [operand for index, operand in enumerate(operands) if index and index not in addresses]
    extras = [extra for operand in operands if isinstance(operand, Address) for extra in operand.extra]
    return _any((*others, *extras), holders)
