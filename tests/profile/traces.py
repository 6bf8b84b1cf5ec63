"""A hand-made trace: a decode step of one product, one addition, a cache append and a position counter."""

from typing import Any

from tessera_core.program.ir import (
    Buffer,
    IoBinding,
    Kernel,
    Op,
    Program,
    State,
    TensorRef,
    Trace,
    Weight,
)

WIDTH, ROWS, CAPACITY = 32, 4, 16
"""Elements of a row, requests in a batch, rows that the cache holds."""


def unique_kernels(trace: Trace) -> dict[str, Kernel]:
    """One kernel of each signature, in program order."""
    kernels: dict[str, Kernel] = {}
    for program in trace.programs:
        for kernel in program.kernels:
            kernels.setdefault(kernel.signature, kernel)
    return kernels


def tiny_trace(seed: int = 0, fake: bool = False) -> Trace:
    """Kernels: product ("sig-mm"), addition ("sig-add") twice, append ("sig-append"), count ("sig-count")."""
    buffers: list[Buffer] = []
    tensors: list[TensorRef] = []

    def tensor(name: str, kind: Any, dtype: str, shape: tuple[int, ...], item: int) -> int:
        size, stride = 1, []
        for extent in reversed(shape):
            stride.insert(0, size)
            size *= extent
        program = None if kind in ("weight", "constant") else 0
        number = len(buffers)
        buffers.append(
            Buffer(id=number, program=program, kind=kind, bytes=size * item, name=name, real=not fake)
        )
        tensors.append(
            TensorRef(id=number, buffer=number, dtype=dtype, shape=shape, stride=tuple(stride), offset=0)
        )
        return number

    x = tensor("x", "input", "float32", (ROWS, WIDTH), 4)
    weight = tensor("w", "weight", "float32", (WIDTH, WIDTH), 4)
    position = tensor("position", "state", "int64", (1,), 8)
    cache = tensor("cache", "state", "float32", (CAPACITY, ROWS, WIDTH), 4)
    product = tensor("", "activation", "float32", (ROWS, WIDTH), 4)
    first = tensor("", "activation", "float32", (ROWS, WIDTH), 4)
    second = tensor("y", "output", "float32", (ROWS, WIDTH), 4)
    row = len(tensors)
    tensors.append(
        TensorRef(
            id=row,
            buffer=second,
            dtype="float32",
            shape=(1, ROWS, WIDTH),
            stride=(ROWS * WIDTH, WIDTH, 1),
            offset=0,
        )
    )
    ref = lambda number: {"tensor": number}  # noqa: E731
    calls: list[tuple[str, list[Any], tuple[int, ...], tuple[int, ...]]] = [
        ("aten.mm.default", [ref(x), ref(weight)], (x, weight), (product,)),
        ("aten.add.Tensor", [ref(product), ref(x)], (product, x), (first,)),
        ("aten.add.Tensor", [ref(first), ref(x)], (first, x), (second,)),
        (
            "aten.index_copy_.default",
            [ref(cache), 0, ref(position), ref(row)],
            (cache, position, row),
            (cache,),
        ),
        ("aten.add_.Tensor", [ref(position), 1], (position,), (position,)),
    ]
    shapes: list[tuple[str, str, int, int, int, Any]] = [
        (
            "sig-mm",
            "matmul",
            2 * ROWS * WIDTH * WIDTH,
            4 * (ROWS * WIDTH + WIDTH * WIDTH),
            4 * ROWS * WIDTH,
            "none",
        ),
        ("sig-add", "pointwise", ROWS * WIDTH, 8 * ROWS * WIDTH, 4 * ROWS * WIDTH, "none"),
        ("sig-add", "pointwise", ROWS * WIDTH, 8 * ROWS * WIDTH, 4 * ROWS * WIDTH, "none"),
        ("sig-append", "copy", 0, 4 * ROWS * WIDTH, 4 * ROWS * WIDTH, "copy"),
        ("sig-count", "counter", 0, 8, 8, "copy"),
    ]
    ops = tuple(
        Op(
            id=number,
            kernel=number,
            target=target,
            schema="",
            arguments={"args": arguments, "kwargs": {}},
            inputs=inputs,
            outputs=outputs,
            operands=(),
        )
        for number, (target, arguments, inputs, outputs) in enumerate(calls)
    )
    kernels = tuple(
        Kernel(
            id=number,
            signature=signature,
            name=signature.removeprefix("sig-"),
            kind=kind,
            flops=flops,
            read_bytes=read,
            written_bytes=written,
            state_writer=writer,
            dtype="float32",
            layer=None,
            ops=(number,),
        )
        for number, (signature, kind, flops, read, written, writer) in enumerate(shapes)
    )
    program = Program(
        id=0,
        name=f"decode:batch={ROWS},context={CAPACITY}",
        phase="decode",
        batch=ROWS,
        context=CAPACITY,
        ops=ops,
        kernels=kernels,
        io=(
            IoBinding(role="input", name="x", tensor=x, feeds=None),
            IoBinding(role="output", name="y", tensor=second, feeds="x"),
            IoBinding(role="state", name="cache", tensor=cache, feeds=None),
            IoBinding(role="state", name="position", tensor=position, feeds=None),
        ),
        guards=(),
    )
    return Trace(
        info={
            "model": "hand-made",
            "source": "embedded",
            "seed": seed,
            "dtype": "float32",
            "fake": fake,
            "replayable": True,
            "notes": [],
            "versions": {},
        },
        programs=(program,),
        buffers=tuple(buffers),
        tensors=tuple(tensors),
        weights=(
            Weight(
                name="w",
                aliases=(),
                buffer=weight,
                tensor=weight,
                init={"kind": "normal", "std": 0.02 + seed},
            ),
        ),
        states=(
            State(name="cache", batch_axis=1, sequence_axis=0, init={"kind": "zeros"}),
            State(name="position", batch_axis=None, sequence_axis=None, init={"kind": "zeros"}),
        ),
        constants=b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ",
    )
