"""A small language for writing programs by hand: tensors first, then ops over them, one kernel each."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from safetensors.torch import save

from tessera_core.program.ir import (
    ITEM_BYTES,
    Buffer,
    Guard,
    IoBinding,
    Kernel,
    Op,
    Program,
    State,
    TensorRef,
    Trace,
    Weight,
)
from tessera_formats.errors import TesseraError


class TraceWriter:
    """Collects buffers, tensors and ops; `trace()` closes the one program and gives the trace."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.tensors: list[TensorRef] = []
        self.ops: list[Op] = []
        self.groups: list[list[int]] = []
        self.io: list[IoBinding] = []
        self.weights: list[Weight] = []
        self.states: list[State] = []
        self.guards: list[Guard] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.info: dict[str, Any] = {"seed": 7, "dtype": "float32"}
        self.batch = 1

    def buffer(self, kind: str, shape: Sequence[int], dtype: str = "float32", name: str = "") -> int:
        """A buffer with one contiguous tensor over it; returns the tensor's id."""
        size = ITEM_BYTES[dtype]
        for extent in shape:
            size *= extent
        number = len(self.buffers)
        program = None if kind in ("weight", "constant") else 0
        self.buffers.append(
            Buffer(id=number, program=program, kind=kind, bytes=size, name=name, real=True)  # type: ignore[arg-type]
        )
        return self.view(number, shape, dtype=dtype)

    def view(
        self,
        buffer: int,
        shape: Sequence[int],
        stride: Sequence[int] | None = None,
        offset: int = 0,
        dtype: str = "float32",
    ) -> int:
        """One more tensor over a buffer (contiguous unless strides are given)."""
        if stride is None:
            stride = list(torch.empty(tuple(shape), device="meta").stride())
        number = len(self.tensors)
        self.tensors.append(
            TensorRef(
                id=number,
                buffer=buffer,
                dtype=dtype,
                shape=tuple(shape),
                stride=tuple(stride),
                offset=offset,
            )
        )
        return number

    def bind(self, role: str, name: str, tensor: int, feeds: str | None = None) -> int:
        """Make a tensor an input, output or state."""
        self.io.append(IoBinding(role=role, name=name, tensor=tensor, feeds=feeds))  # type: ignore[arg-type]
        return tensor

    def input(self, name: str, shape: Sequence[int], dtype: str = "float32") -> int:
        return self.bind("input", name, self.buffer("input", shape, dtype, name))

    def state(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str = "float32",
        batch_axis: int | None = None,
        sequence_axis: int | None = None,
        init: dict[str, Any] | None = None,
    ) -> int:
        family = State(
            name=name, batch_axis=batch_axis, sequence_axis=sequence_axis, init=init or {"kind": "zeros"}
        )
        self.states.append(family)
        return self.bind("state", name, self.buffer("state", shape, dtype, name))

    def weight(
        self, name: str, shape: Sequence[int], init: dict[str, Any], aliases: Sequence[str] = ()
    ) -> int:
        tensor = self.buffer("weight", shape, name=name)
        self.weights.append(
            Weight(
                name=name,
                aliases=tuple(aliases),
                buffer=self.tensors[tensor].buffer,
                tensor=tensor,
                init=init,
            )
        )
        return tensor

    def constant(self, value: torch.Tensor) -> int:
        tensor = self.buffer("constant", tuple(value.shape), str(value.dtype)[6:])
        self.constants[f"buffer.{self.tensors[tensor].buffer}"] = (
            value.contiguous().view(torch.uint8).reshape(-1)
        )
        return tensor

    def op(
        self,
        target: str,
        args: Sequence[Any],
        outputs: Sequence[int],
        kwargs: dict[str, Any] | None = None,
        *,
        same_kernel: bool = False,
        **extra: Any,
    ) -> None:
        """An op; {"tensor": n} in its arguments refers to tensor n."""
        arguments = {"args": list(args), "kwargs": kwargs or {}, **extra}
        number = len(self.ops)
        if same_kernel:
            self.groups[-1].append(number)
        else:
            self.groups.append([number])
        self.ops.append(
            Op(
                id=number,
                kernel=len(self.groups) - 1,
                target=target,
                schema="",
                arguments=arguments,
                inputs=tuple(_references(arguments)),
                outputs=tuple(outputs),
                operands=(),
            )
        )

    def trace(self) -> Trace:
        kernels = tuple(
            Kernel(
                id=number,
                signature="",
                name=f"kernel{number}",
                kind="other",
                flops=0,
                read_bytes=0,
                written_bytes=0,
                state_writer="none",
                dtype="float32",
                layer=None,
                ops=tuple(group),
            )
            for number, group in enumerate(self.groups)
        )
        program = Program(
            id=0,
            name=f"step:batch={self.batch},context=0",
            phase="step",
            batch=self.batch,
            context=0,
            ops=tuple(self.ops),
            kernels=kernels,
            io=tuple(self.io),
            guards=tuple(self.guards),
        )
        return Trace(
            info=self.info,
            programs=(program,),
            buffers=tuple(self.buffers),
            tensors=tuple(self.tensors),
            weights=tuple(self.weights),
            states=tuple(self.states),
            constants=save(self.constants),
        )


def _references(value: Any) -> list[int]:
    if isinstance(value, dict):
        if set(value) == {"tensor"} and isinstance(value["tensor"], int):
            return [value["tensor"]]
        return [number for entry in value.values() for number in _references(entry)]
    if isinstance(value, list):
        return [number for entry in value for number in _references(entry)]
    return []


@pytest.fixture
def writer() -> TraceWriter:
    return TraceWriter()


@pytest.fixture
def writer_class() -> type[TraceWriter]:
    return TraceWriter


@pytest.fixture
def one_line() -> Callable[[pytest.ExceptionInfo[TesseraError]], str]:
    """The message of an error, after checking that it is one line."""

    def check(caught: pytest.ExceptionInfo[TesseraError]) -> str:
        text = str(caught.value)
        assert text
        assert "\n" not in text
        return text

    return check
