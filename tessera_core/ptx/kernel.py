"""One entry of a module made ready for interpretation, shared by all its launches."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from tessera_core.ptx.flow import Flow, Step, build_flow
from tessera_core.ptx.parameters import ParameterBlock
from tessera_core.ptx.parser import type_bytes
from tessera_core.ptx.syntax import Address, Function, Module, Name, Vector, registers
from tessera_core.ptx.values import NUMBER, Value, constant
from tessera_formats.errors import InputError

# Bases that are not buffers of the launch; module variables count down from FIRST_VARIABLE.
PARAMETERS, SHARED, LOCAL, HEAP, FIRST_VARIABLE = -2, -3, -4, -5, -6

_DYNAMIC_SHARED_BYTES = 1 << 20  # more than any GPU has for one block

_PRIVATE = frozenset({"shared", "local", "generic", "param"})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kernel:
    """``symbols``: addresses of parameters and variables. ``variables``: names of module variables in device
    memory. ``positions``: for every step index, the first step at or after it that is worth running, as a position
    in ``flow.runs``."""

    module: Module
    function: Function
    flow: Flow
    symbols: Mapping[str, Value]
    variables: tuple[str, ...]

    def position(self, step: int) -> int:
        """Position in ``flow.runs`` at which threads that go to ``step`` go on."""
        return bisect_left(self.flow.runs, step)

    def join(self, position: int) -> int:
        """Position at which the paths of the branch at ``position`` surely meet."""
        return self.position(self.flow.joins.get(self.flow.runs[position], len(self.flow.steps)))

    def doomed_positions(self) -> frozenset[int]:
        """Positions from which a launch cannot end properly."""
        return frozenset(self.position(step) for step in self.flow.doomed if step in self.flow.runs)

    def stores_pointers(self, parameters: ParameterBlock) -> bool:
        """Whether a pointer parameter, or anything computed from one, may be put into shared or local memory or
        handed to a callee, from where a load could bring it back. Follows registers regardless of order."""
        offsets = self.function.parameter_offsets()
        carriers: set[str] = set()
        stored = False
        changed = True
        while changed:
            changed = False
            for step in self.flow.steps:
                carries = self._carries(step, carriers, stored, offsets, parameters)
                if not carries:
                    continue
                if (
                    any(touch.writes and touch.space in _PRIVATE for touch in step.effects.touches)
                    and not stored
                ):
                    stored = changed = True
                for name in step.writes:
                    if name not in carriers:
                        carriers.add(name)
                        changed = True
        return stored

    def _carries(
        self,
        step: Step,
        carriers: set[str],
        stored: bool,
        offsets: Mapping[str, int],
        parameters: ParameterBlock,
    ) -> bool:
        touches = step.effects.touches
        if step.effects.reaches_all:
            return True
        if step.parts[0] == "ld" and touches:
            if touches[0].space == "param":
                return self._loads_pointer(step, offsets, parameters)
            return stored and touches[0].space in _PRIVATE
        if touches:
            addresses = {touch.operand for touch in touches}
            sources = [operand for index, operand in enumerate(step.operands) if index not in addresses]
            if step.parts[0] not in ("st", "red", "atom", "tensormap"):
                return False
            return any(name in carriers for operand in sources for name in registers(operand))
        return any(
            name in carriers or (name in self.symbols and name in offsets)
            for operand in step.operands[1:]
            for name in registers(operand)
        )

    @staticmethod
    def _loads_pointer(step: Step, offsets: Mapping[str, int], parameters: ParameterBlock) -> bool:
        address = step.operands[1] if len(step.operands) > 1 else None
        if (
            not isinstance(address, Address)
            or not isinstance(address.base, Name)
            or address.base.text not in offsets
        ):
            return True
        lanes = len(step.operands[0].elements) if isinstance(step.operands[0], Vector) else 1
        start = offsets[address.base.text] + address.offset
        return parameters.touches_pointer(start, type_bytes(step.parts[-1]) * lanes)


@lru_cache(maxsize=256)
def kernel_of(module: Module, entry: str) -> Kernel:
    """The kernel ``entry`` of ``module``. Raises InputError where the module has none of that name."""
    function = next((f for f in module.entries() if f.name == entry), None)
    if function is None:
        names = ", ".join(f.name for f in module.entries()) or "none"
        raise InputError(f"{module.name} has no kernel {entry!r}; name one of: {names}")
    flow = build_flow(function, {f.name: f for f in module.functions if f.body is not None})
    offsets = function.parameter_offsets()
    symbols: dict[str, Value] = {name: constant(offset, PARAMETERS) for name, offset in offsets.items()}
    variables: list[str] = []
    shared_end = _DYNAMIC_SHARED_BYTES
    local_end = 0
    for declaration in (*module.variables, *flow.local):
        name = declaration.name
        if name in symbols:
            continue
        if declaration.space == "shared":
            # all arrays of open extent are the same dynamic shared memory; the others lie apart
            symbols[name] = constant(shared_end if declaration.bytes else 0, SHARED)
            shared_end += -(-declaration.bytes // 128) * 128
        elif declaration.space in ("local", "param"):
            symbols[name] = constant(local_end, LOCAL)
            local_end += -(-max(1, declaration.bytes) // 256) * 256
        elif declaration.space in ("global", "const"):
            symbols[name] = constant(0, FIRST_VARIABLE - len(variables))
            variables.append(name if declaration.space == "global" else "")
    return Kernel(module=module, function=function, flow=flow, symbols=symbols, variables=tuple(variables))


def carried_bases(kernel: Kernel, parameters: ParameterBlock) -> frozenset[int]:
    """What a load from shared or local memory may point into."""
    return parameters.buffers() | NUMBER if kernel.stores_pointers(parameters) else NUMBER
