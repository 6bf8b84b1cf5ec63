"""A small trace built by hand, and plans for it."""

from collections.abc import Mapping, Sequence
from typing import Any

from safetensors.torch import save

from tessera_core.plan.ir import Assignment, Home, Plan, PlanDevice, Route, Transfer
from tessera_core.program.boxes import Box
from tessera_core.program.ir import (
    Buffer,
    IoBinding,
    Kernel,
    Op,
    Operand,
    Program,
    State,
    TensorRef,
    Trace,
    Weight,
)

HIDDEN, WORDS = 16, 31
ITEM = {"float32": 4, "int64": 8}


class Recorder:
    """Collects buffers and tensors over programs, ops and kernels within one."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.tensors: list[TensorRef] = []
        self.weights: list[Weight] = []
        self.programs: list[Program] = []
        self.ops: list[Op] = []
        self.kernels: list[Kernel] = []

    def tensor(self, kind: Any, shape: Sequence[int], dtype: str = "float32", name: str = "") -> int:
        size = ITEM[dtype]
        strides, step = [], 1
        for extent in reversed(shape):
            strides.insert(0, step)
            step *= extent
        owner = None if kind in ("weight", "constant") else len(self.programs)
        self.buffers.append(
            Buffer(id=len(self.buffers), program=owner, kind=kind, bytes=step * size, name=name, real=True)
        )
        self.tensors.append(
            TensorRef(
                id=len(self.tensors),
                buffer=len(self.buffers) - 1,
                dtype=dtype,
                shape=tuple(shape),
                stride=tuple(strides),
                offset=0,
            )
        )
        return len(self.tensors) - 1

    def weight(self, name: str, shape: Sequence[int], std: float) -> int:
        tensor = self.tensor("weight", shape, name=name)
        self.weights.append(
            Weight(
                name=name,
                aliases=(),
                buffer=self.tensors[tensor].buffer,
                tensor=tensor,
                init={"kind": "normal", "mean": 0.0, "std": std},
            )
        )
        return tensor

    def op(
        self,
        target: str,
        arguments: Sequence[Any],
        output: int,
        *,
        writer: str = "none",
        in_place: bool = False,
        **kwargs: Any,
    ) -> int:
        """One op as a kernel of its own; tensors in ``arguments`` are ("t", id)."""
        encoded = [{"tensor": item[1]} if isinstance(item, tuple) else item for item in arguments]
        inputs = tuple(item[1] for item in arguments if isinstance(item, tuple))
        number = len(self.ops)

        def operand(tensor: int, mode: Any, must: bool) -> Operand:
            return Operand(
                tensor=tensor, mode=mode, must=must, valid_for="shapes", evidence="schema", boxes=None
            )

        self.ops.append(
            Op(
                id=number,
                kernel=number,
                target=target,
                schema=target,
                arguments={"args": encoded, "kwargs": kwargs},
                inputs=inputs,
                outputs=(output,),
                operands=(
                    *(operand(tensor, "read", False) for tensor in inputs),
                    operand(output, "write", not in_place),
                ),
            )
        )
        self.kernels.append(
            Kernel(
                id=number,
                signature=f"{target}/{self.tensors[output].shape}",
                name=target,
                kind="other",
                flops=0,
                read_bytes=0,
                written_bytes=0,
                state_writer=writer,  # type: ignore[arg-type]
                dtype="float32",
                layer=None,
                ops=(number,),
            )
        )
        return output

    def end(self, name: str, phase: str, batch: int, context: int, io: Sequence[IoBinding]) -> None:
        self.programs.append(
            Program(
                id=len(self.programs),
                name=name,
                phase=phase,
                batch=batch,
                context=context,
                ops=tuple(self.ops),
                kernels=tuple(self.kernels),
                io=tuple(io),
                guards=(),
            )
        )
        self.ops, self.kernels = [], []


def layered_trace(
    layers: int = 3, prefill_batch: int = 1, batch: int = 2, context: int = 5, in_place: bool = False
) -> Trace:
    """Prefill and decode of a recurrent toy: embedding, matrix products, a summed state, argmax.

    Kernels of each program: 0 embedding, 1 mean over tokens, 2 state += h, 3 h + state, then per layer a matrix
    product and a tanh, at last logits and argmax. ``in_place``: each layer then halves its result in place.
    """
    record = Recorder()
    table = record.weight("table", (WORDS, HIDDEN), 1.0)
    matrices = [record.weight(f"layer.{i}", (HIDDEN, HIDDEN), 0.5) for i in range(layers)]
    head = record.weight("head", (HIDDEN, WORDS), 1.0)
    for phase, rows, length in (("prefill", prefill_batch, context), ("decode", batch, 1)):
        tokens = record.tensor("input", (rows, length), "int64", "tokens")
        state = record.tensor("state", (rows, HIDDEN), name="sum")

        def fresh(*shape: int) -> int:
            return record.tensor("activation", shape)

        h = record.op("aten.embedding.default", [("t", table), ("t", tokens)], fresh(rows, length, HIDDEN))
        h = record.op("aten.mean.dim", [("t", h), [1]], fresh(rows, HIDDEN))
        record.op("aten.add_.Tensor", [("t", state), ("t", h)], state, writer="compute", in_place=True)
        h = record.op("aten.add.Tensor", [("t", h), ("t", state)], fresh(rows, HIDDEN))
        for matrix in matrices:
            h = record.op("aten.mm.default", [("t", h), ("t", matrix)], fresh(rows, HIDDEN))
            h = record.op("aten.tanh.default", [("t", h)], fresh(rows, HIDDEN))
            if in_place:
                record.op("aten.mul_.Tensor", [("t", h), 1.5], h, in_place=True)
        logits = record.tensor("output", (rows, WORDS), name="logits")
        record.op("aten.mm.default", [("t", h), ("t", head)], logits)
        chosen = record.tensor("output", (rows, 1), "int64", "next_token")
        record.op("aten.argmax.default", [("t", logits), -1, True], chosen)
        record.end(
            f"{phase}:batch={rows},context={context if phase == 'prefill' else 64}",
            phase,
            rows,
            context if phase == "prefill" else 64,
            [
                IoBinding(role="input", name="tokens", tensor=tokens, feeds=None),
                IoBinding(role="state", name="sum", tensor=state, feeds=None),
                IoBinding(role="output", name="logits", tensor=logits, feeds=None),
                IoBinding(role="output", name="next_token", tensor=chosen, feeds="tokens"),
            ],
        )
    return Trace(
        info={
            "program_digest": "sha256:0",
            "model": "toy",
            "source": "embedded",
            "seed": 3,
            "dtype": "float32",
            "fake": False,
            "replayable": True,
            "notes": [],
            "versions": {},
        },
        programs=tuple(record.programs),
        buffers=tuple(record.buffers),
        tensors=tuple(record.tensors),
        weights=tuple(record.weights),
        states=(State(name="sum", batch_axis=0, sequence_axis=None, init={"kind": "zeros"}),),
        constants=save({}),
    )


def place(
    trace: Trace,
    devices: Mapping[str, Mapping[str, str]] | str,
    *,
    route: int = 0,
    programs: Sequence[str] | None = None,
    rates: Sequence[int] = (2, 7),
    slots: int = 2,
    share: float = 1.0,
    time_us: float = 10.0,
    transfer_us: float = 0.0,
    boxes: bool = False,
) -> tuple[Route, list[Assignment], list[Transfer], list[Home]]:
    """A route from program -> kernel ranges ("0-3" or "4") -> device; transfers are derived by brute force."""
    names = [program.name for program in trace.programs] if programs is None else list(programs)
    assignments: list[Assignment] = []
    where: dict[tuple[str, int], str] = {}
    for name in names:
        count = len(trace.program(name).kernels)
        table = {f"0-{count - 1}": devices} if isinstance(devices, str) else devices[name]
        for span, device in table.items():
            low, _, high = span.partition("-")
            for kernel in range(int(low), int(high or low) + 1):
                where[name, kernel] = device
    for (name, kernel), device in sorted(where.items()):
        assignments.append(
            Assignment(route=route, program=name, kernel=kernel, part="whole", device=device, time_us=time_us)
        )
    transfers = [
        Transfer(
            route=route,
            program=name,
            order=order,
            buffer=buffer,
            producer=producer,
            source=where[name, producer],
            destination=destination,
            bytes=trace.buffers[buffer].bytes,
            boxes=_rows(trace, buffer) if boxes else None,
            combine="copy",
            time_us=transfer_us,
        )
        for name, (next_name) in zip(names, [*names[1:], names[-1]], strict=True)
        for order, (producer, buffer, destination) in enumerate(_crossings(trace, name, next_name, where))
    ]
    homes = [
        Home(route=route, state="sum", device=device)
        for device in dict.fromkeys(where[name, 2] for name in names)
    ]
    batch = trace.program(names[-1]).batch
    made = Route(
        route=route, share=share, batch=batch, slots=slots, programs=tuple(names), rates=tuple(rates)
    )
    return made, assignments, transfers, homes


def _rows(trace: Trace, buffer: int) -> tuple[Box, ...]:
    """A buffer's bytes as one box for each half: what a must-write of all of it is shipped as."""
    size = trace.buffers[buffer].bytes
    return (Box.interval(0, size // 2), Box.interval(size // 2, size - size // 2))


def _crossings(
    trace: Trace, name: str, next_name: str, where: Mapping[tuple[str, int], str]
) -> list[tuple[int, int, str]]:
    program, following = trace.program(name), trace.program(next_name)
    writer: dict[int, int] = {}
    found: dict[tuple[int, int, str], None] = {}
    for op in program.ops:
        for tensor in op.inputs:
            buffer = trace.tensors[tensor].buffer
            if buffer in writer and where[name, writer[buffer]] != where[name, op.kernel]:
                found[writer[buffer], buffer, where[name, op.kernel]] = None
        for tensor in op.outputs:
            writer[trace.tensors[tensor].buffer] = op.kernel
    for output in program.bindings("output").values():
        if output.feeds is None:
            continue
        buffer = trace.tensors[output.tensor].buffer
        fed = following.bindings("input")[output.feeds].tensor
        for op in following.ops:
            if fed in op.inputs and where[next_name, op.kernel] != where[name, writer[buffer]]:
                found[writer[buffer], buffer, where[next_name, op.kernel]] = None
    return sorted(found)


def make_plan(
    *routes: tuple[Route, list[Assignment], list[Transfer], list[Home]],
    types: Mapping[str, str],
    facts: Mapping[str, Any] | None = None,
) -> Plan:
    """A plan with the least of what an artifact must say."""
    return Plan(
        devices=tuple(
            PlanDevice(name=name, type=kind, capacity_bytes=1 << 30, memory_domain=name)
            for name, kind in types.items()
        ),
        routes=tuple(route for route, *_ in routes),
        assignments=tuple(item for _, assignments, *_ in routes for item in assignments),
        transfers=tuple(item for _, _, transfers, _ in routes for item in transfers),
        homes=tuple(item for *_, homes in routes for item in homes),
        facts={
            "program_digest": "sha256:0",
            "deps_digest": "sha256:0",
            "profile_digest": "sha256:0",
            "cluster_digest": "sha256:0",
            "policy": "throughput",
            "strategy": "placement",
            "requested": "placement",
            "condition": "beside",
            "targets": [],
            "prediction": {
                "objective_us": 1.0,
                "lower_bound_us": 1.0,
                "gap": 0.0,
                "tokens_per_s": 1.0,
                "time_per_token_us": 1.0,
                "measured_share": 1.0,
                "silicon_share": 0.0,
                "modelled_share": 0.0,
                "probability_best": 1.0,
                "intervals": [],
            },
            "compared": [],
            "memory": [],
            **(facts or {}),
        },
    )
