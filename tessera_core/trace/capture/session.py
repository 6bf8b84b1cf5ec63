"""Capturing one kernel on a CUDA device: compile, warm up, capture under watch, read, resolve, check."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tessera_core.program.ir import Kernel, Program, Trace
from tessera_core.program.memory import Memory
from tessera_core.program.replay import local_buffers
from tessera_core.trace.capture.addresses import (
    AddressBook,
    Interval,
    Lifetime,
    Mark,
    Owned,
    intervals,
    lifetimes,
    pointers,
    word_offsets,
)
from tessera_core.trace.capture.driver import allocation_of, nodes_while_capturing, read_graph
from tessera_core.trace.capture.graph import RawGraph
from tessera_core.trace.capture.group import Group, check_results, kernel_group
from tessera_core.trace.capture.modules import ModuleBook
from tessera_core.trace.capture.tables import Captured, check_boundary
from tessera_core.trace.capture.watch import watched
from tessera_formats.errors import ModelError, TesseraError

# So that a pointer to the end of one buffer never looks like the start of the next.
_PADDING_BYTES = 512
_WARM_UPS = 2
_MAX_EVENTS = 1_000_000

Call = Callable[..., Any]


@dataclass(slots=True, kw_only=True)
class Session:
    """Captures kernels of one trace on one device; equal signatures share one compiled function.

    ``compiled`` False runs the ops as PyTorch runs them eagerly. ``functions``: what was built, by signature.
    """

    trace: Trace
    device: str
    compiled: bool = True
    trusted: bool = False
    modules: ModuleBook = field(default_factory=ModuleBook)
    functions: dict[str, Call] = field(default_factory=dict)
    handles: dict[tuple[str | None, str], int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    _local: dict[int, list[list[int]]] = field(default_factory=dict)
    _stream: Any = None

    def group(self, program: Program, kernel: int) -> Group:
        """The kernel's ops as a function of its own tensors."""
        if program.id not in self._local:
            self._local[program.id] = local_buffers(self.trace, program)
        return kernel_group(
            self.trace,
            program,
            kernel,
            local=self._local[program.id][kernel],
            trusted=self.trusted,
            device=self.device,
        )

    def function(self, signature: str, group: Group) -> Call:
        """What runs a group: compiled once per signature, or the group's own function."""
        if signature not in self.functions:
            built: Call = group.function
            if self.compiled and not group.native:
                built = compile_function(group)
            self.functions[signature] = built
        return self.functions[signature]

    def capture(self, program: Program, kernel: Kernel) -> Captured:
        """Capture one kernel with buffers of its own; raises :class:`UntracedLaunchError` and ModelError."""
        started = time.perf_counter()
        group = self.group(program, kernel.id)
        function = self.function(kernel.signature, group)
        memory, given = self._memory(group)
        arguments = group.arguments(memory)
        stream = self._work_stream()
        where = f"{program.name}, kernel {kernel.id} ({kernel.name})"
        try:
            with torch.no_grad(), torch.cuda.stream(stream), self.modules.listening():
                for _ in range(_WARM_UPS):
                    check_results(group, self.trace, function(*arguments))
                torch.cuda.synchronize(self.device)
                graph, results, marks, kept, log, standing = self._watch(function, arguments, stream)
        except TesseraError:
            raise
        except Exception as problem:
            line = str(problem).strip().partition("\n")[0]
            raise ModelError(
                f"{where}: cannot be captured on {self.device} ({type(problem).__name__}: {line});"
                " try --no-compile"
            ) from problem
        raw = read_graph(int(graph.raw_cuda_graph()))
        book = AddressBook(
            given=given,
            made=self._made(group, results),
            born=lifetimes(log),
            standing=standing,
            foreign=allocation_of,
        )
        captured = self._resolve(program, kernel, raw, marks, book)
        del results, kept, arguments, memory
        graph.reset()
        self.seconds[kernel.signature] = time.perf_counter() - started
        return captured

    def _resolve(
        self, program: Program, kernel: Kernel, raw: RawGraph, marks: Sequence[Mark], book: AddressBook
    ) -> Captured:
        spans = intervals(marks)
        whole = Interval(0, marks[-1].allocated)
        blocks, found = [], []
        for launch in raw.launches:
            words = word_offsets(len(launch.parameters), launch.layout)
            block, targets = pointers(launch.parameters, words, book, spans.get(launch.node, whole))
            blocks.append(block)
            found.append(targets)
            if launch.kind == "kernel":
                module = self.modules.meet(launch.handle, launch.function)
                self.handles[module, launch.function] = launch.handle
        return Captured(
            program=program.id,
            kernel=kernel.id,
            launches=raw.launches,
            parameters=tuple(blocks),
            pointers=tuple(found),
            edges=raw.edges,
            scratch=tuple(book.scratch),
            unread=check_boundary(self.trace, program, kernel, found),
        )

    def _memory(self, group: Group) -> tuple[Memory, list[Owned]]:
        """Padded storages for what the group is given: floats normal, integers zero (a valid index)."""
        memory = Memory(self.trace, device=self.device)
        given = []
        for tensor in group.inputs:
            buffer = self.trace.tensors[tensor].buffer
            if not memory.is_bound(buffer):
                size = self.trace.buffers[buffer].bytes + _PADDING_BYTES
                storage = torch.zeros(size, dtype=torch.uint8, device=self.device).untyped_storage()
                memory.bind(buffer, storage)
                given.append(Owned(storage.data_ptr(), size, buffer))
        for view in group.arguments(memory):
            if view.numel() and view.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
                # From its first element to its last in a row, because an expanded view can't be filled itself.
                reach = sum((n - 1) * step for n, step in zip(view.shape, view.stride()))
                view.as_strided((reach + 1,), (1,)).normal_()
        return memory, given

    def _made(self, group: Group, results: Sequence[torch.Tensor]) -> list[Owned]:
        return [
            Owned(
                value.untyped_storage().data_ptr(),
                value.untyped_storage().nbytes(),
                self.trace.tensors[tensor].buffer,
            )
            for tensor, value in zip(group.results, results, strict=True)
        ]

    def _work_stream(self) -> Any:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        return self._stream

    def _watch(
        self, function: Call, arguments: Sequence[torch.Tensor], stream: Any
    ) -> tuple[Any, Any, list[Mark], list[torch.Tensor], list[Any], list[Lifetime]]:
        """Capture a call: the graph, its results, marks, tensors kept alive, the allocator's log, old blocks."""
        index = torch.device(self.device).index or 0
        standing = _standing(index)
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=_MAX_EVENTS)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        try:
            start = _counts(index)

            def mark() -> Mark:
                allocated, freed = _counts(index)
                return Mark(allocated - start[0], freed - start[1], nodes_while_capturing(stream.cuda_stream))

            graph.capture_begin(capture_error_mode="thread_local")
            try:
                results, marks, kept = watched(function, arguments, mark)
            finally:
                graph.capture_end()
            log = torch.cuda.memory._snapshot(index)["device_traces"][index]
        finally:
            torch.cuda.memory._record_memory_history(None)
        return graph, results, marks, kept, log, standing


def compile_function(group: Group, **options: Any) -> Call:
    """``torch.compile`` of a group for its own shapes, with kernels loaded so that Triton's hooks see them.

    Products aren't padded: a padded result would come back as a view of something larger than recorded.
    """
    known = torch._inductor.list_options()
    unwanted = [name for name in ("use_static_cuda_launcher", "shape_padding") if name in known]
    settings: dict[str, Any] = {**dict.fromkeys(unwanted, False), **options}
    built: Call = torch.compile(group.function, fullgraph=True, dynamic=False, options=settings)
    return built


def _counts(index: int) -> tuple[int, int]:
    found = torch.cuda.memory_stats_as_nested_dict(index)["allocation"]["all"]
    return found["allocated"], found["freed"]


def _standing(index: int) -> list[Lifetime]:
    """Blocks in use in the caching allocator, a library's workspaces among them."""
    found = []
    for segment in torch.cuda.memory_snapshot():
        if segment["device"] != index:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"].startswith("active"):
                found.append(Lifetime(block.get("address", address), block["size"], -1, None))
            address += block["size"]
    return found
