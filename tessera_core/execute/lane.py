"""What one slot of a route holds on one device: its memory, its receive regions, and how work changes them.

Weights and constants are shared between the lanes of a device; everything else belongs to one lane. Where a
buffer lives here follows one rule:

* what an op here allocates lives from that op to its last use in the iteration, then it is released,
* a buffer that is received once and has no other content here is the receive region itself, without a copy,
* any other (state, inputs, what was allocated elsewhere and is written here too) has a storage of its own,
  bound from the start.

Receives of the first and last kind are copied in when the segment that waits for them starts.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from tessera_core.execute.arena import ArenaLayout
from tessera_core.execute.dispatch import Landing, Progress
from tessera_core.execute.feeds import (
    born_buffers,
    kernel_buffers,
    last_uses,
    prompted_inputs,
    renewed_inputs,
    taken_after,
)
from tessera_core.execute.segments import RouteModel, RouteProgram, Segment
from tessera_core.program.boxes import Box
from tessera_core.program.generate import move_state
from tessera_core.program.ir import IoBinding, Program, Trace
from tessera_core.program.memory import Memory, view_of
from tessera_core.program.replay import KernelRunner, local_buffers
from tessera_core.program.weights import fill, materialise_weights, random_inputs

Runners = Mapping[tuple[int, int], tuple[KernelRunner, ...]]
"""The kernels of each (program, segment index) of a route on one device."""


class LaneMemory:
    """One slot of a route on one device."""

    def __init__(
        self,
        trace: Trace,
        model: RouteModel,
        device: str,
        shared: Mapping[int, torch.UntypedStorage],
        regions: Mapping[int, torch.UntypedStorage],
        runners: Runners,
        seed: int,
    ) -> None:
        self.model = model
        self.batch = -1
        self._trace, self._seed, self._runners, self._regions = trace, seed, runners, regions
        self._programs = [trace.program(item.name) for item in model.programs]
        self._schedule: tuple[int, ...] = ()
        self._requests: list[int] = []
        self._tokens: dict[int, list[int]] = {}
        self._digests: dict[str, str] = {}
        used = _used_buffers(trace, model, device)
        zero_copy = {
            move.transfer.buffer: move.index
            for move in model.transfers
            if move.transfer.destination == device and move.used and not move.copied
        }
        born = set().union(
            *(
                born_buffers(trace, program, _kernels(item.segments.get(device, ())))
                for program, item in zip(self._programs, model.programs, strict=True)
            )
        )
        self._memory = Memory(trace)
        for buffer in sorted(used):
            kind = trace.buffers[buffer].kind
            if kind in ("weight", "constant"):
                self._memory.bind(buffer, shared[buffer])
            elif buffer in zero_copy:
                self._memory.bind(buffer, regions[zero_copy[buffer]])
            elif kind in ("state", "input") or buffer not in born:
                self._memory.bind(buffer, _zeros(trace.buffers[buffer].bytes))
        self._spent = [
            _spent(trace, program, item.segments.get(device, ()))
            for program, item in zip(self._programs, model.programs, strict=True)
        ]
        indices = range(len(self._programs))
        self._prompted = [prompted_inputs(self._programs, index) for index in indices]
        self._renewed = [renewed_inputs(trace, self._programs, index) for index in indices]
        self._states = [
            {
                name: trace.tensors[binding.tensor].buffer
                for name, binding in program.bindings("state").items()
                if trace.tensors[binding.tensor].buffer in used
            }
            for program in self._programs
        ]
        self._inputs = [
            {
                name: binding.tensor
                for name, binding in program.bindings("input").items()
                if trace.tensors[binding.tensor].buffer in used
            }
            for program in self._programs
        ]
        self._taken_here = [
            _outputs_taken(trace, program, item.segments.get(device, ()))
            for program, item in zip(self._programs, model.programs, strict=True)
        ]

    def warm_up(self) -> None:
        """Run every kernel once on whatever lies in memory, so that first-time costs lie before the run."""
        self.start(-1, list(range(self.model.batch)), range(len(self._programs)))
        for program in range(len(self._programs)):
            self._prompt(program, 0)
        for program, segment in self._runners:
            self.compute(program, segment)
            self._release(program, segment)

    def start(self, batch: int, requests: Sequence[int], schedule: Sequence[int]) -> None:
        """A batch enters: fresh state, prompts in place. ``requests``: one id per row of the slot."""
        self.batch, self._requests, self._schedule = batch, list(requests), tuple(schedule)
        self._tokens, self._digests = {}, {}
        for program in dict.fromkeys(self._schedule):
            self._reset(program)
            first = program == self._schedule[0]
            self._prompt(program, 0, None if first else self._prompted[program])

    def receive(self, transfer: int) -> None:
        """Make an arrived transfer the content of its buffer."""
        item = self.model.transfers[transfer]
        if item.copied:
            move = item.transfer
            size = self._trace.buffers[move.buffer].bytes
            _copy(self._regions[transfer], self._memory.storage(move.buffer), move.boxes, size)

    def compute(self, program: int, segment: int) -> None:
        """Run the kernels of a segment."""
        memory = self._memory
        for runner in self._runners[program, segment]:
            runner(memory)

    def send(self, transfer: int) -> tuple[int, str]:
        """Copy a transfer's bytes into its region; gives the bytes and the receiver."""
        move = self.model.transfers[transfer].transfer
        size = self._trace.buffers[move.buffer].bytes
        _copy(self._memory.storage(move.buffer), self._regions[transfer], move.boxes, size)
        return move.bytes, move.destination

    def source(self, transfer: int) -> str:
        """The device that sends a transfer."""
        return self.model.transfers[transfer].transfer.source

    def collect(self, program: int, segment: int, iteration: int) -> None:
        """End a segment: keep the tokens and final outputs that it has made, release what it sent last."""
        for binding in self._taken_here[program].get(segment, ()):
            value = self._memory.view(binding.tensor)
            tokens = token_values(binding, value)
            if tokens is not None:
                self._tokens[iteration] = tokens
            if iteration == len(self._schedule) - 1:
                self._digests[binding.name] = output_digest(value)
        self._release(program, segment)

    def _release(self, program: int, segment: int) -> None:
        for buffer in self._spent[program].get(segment, ()):
            self._memory.release(buffer)

    def carry_out(self, progress: Progress) -> tuple[list[tuple[int, int, int, int, int]], tuple[int, ...]]:
        """Do what an event led to; gives moves (iteration, program, bytes, start and end in ns) and freed regions.

        Outputs made here land before the iteration's end prepares the next one; those received, after it.
        """
        moves: list[tuple[int, int, int, int, int]] = []
        for landing in progress.landed:
            if landing.feed.transfer is None:
                self._land(landing)
        for iteration, program in progress.ended:
            start = time.monotonic_ns()
            size = self._end_iteration(iteration, program)
            if size:
                moves.append((iteration, program, size, start, time.monotonic_ns()))
        for landing in progress.landed:
            if landing.feed.transfer is not None:
                self._land(landing)
        return moves, progress.freed

    def _land(self, landing: Landing) -> None:
        """Put an output into the input that it feeds, at its requests' rows."""
        source = self._programs[landing.program]
        target = self.model.programs[landing.program].target
        binding = source.bindings("output")[landing.feed.output]
        if landing.feed.transfer is None:
            value = self._memory.view(binding.tensor)
        else:
            value = view_of(self._regions[landing.feed.transfer], self._trace.tensors[binding.tensor])
        wanted = self._memory.view(self._inputs[target][landing.feed.input])
        first = self._first_row(landing.program, landing.iteration)
        wanted.narrow(0, first, value.shape[0]).copy_(value)

    def _end_iteration(self, iteration: int, program: int) -> int:
        """Hand state on to the next phase and prepare the program's next iteration; gives the bytes moved."""
        target = self.model.programs[program].target
        if target == program:
            self._prompt(program, 0, self._renewed[program])
            return 0
        moved = 0
        first = self._first_row(program, iteration)
        if target in self._schedule:
            here = [name for name in self._states[program] if name in self._states[target]]
            if here:
                memory, programs = self._memory, self._programs
                move_state(self._trace, programs[program], memory, programs[target], memory, first, here)
                moved = sum(self._trace.buffers[self._states[program][name]].bytes for name in here)
        if self._schedule[iteration + 1 : iteration + 2] == (program,):
            self._reset(program)
            self._prompt(program, first + self._programs[program].batch)
        return moved

    def finish(self) -> tuple[dict[int, list[int]], dict[str, str]]:
        """The batch's tokens by iteration, and digests of its final outputs, as far as they were made here."""
        self.batch = -1
        return self._tokens, self._digests

    def _first_row(self, program: int, iteration: int) -> int:
        if self.model.programs[program].target == program:
            return 0
        return (iteration - self._schedule.index(program)) * self._programs[program].batch

    def _reset(self, program: int) -> None:
        """Make state fresh, in place: a copy to take it from would cost as much memory again."""
        families = {family.name: family.init for family in self._trace.states}
        bindings = self._programs[program].bindings("state")
        for buffer in self._states[program].values():
            size = self._trace.buffers[buffer].bytes
            _bytes(self._memory.storage(buffer), size).zero_()
        for name in self._states[program]:
            if families[name].get("kind") != "zeros":
                value = self._memory.view(bindings[name].tensor)
                fill(value, f"state:{name}", families[name], int(self._trace.info["seed"]))

    def _prompt(self, program: int, first: int, names: Collection[str] | None = None) -> None:
        """Put the prompts of the requests from ``first`` on into inputs (None: all that are here)."""
        here = {name: t for name, t in self._inputs[program].items() if names is None or name in names}
        if here:
            record = self._programs[program]
            values = random_inputs(
                self._trace, record, self._seed, self._requests[first : first + record.batch]
            )
            for name, tensor in here.items():
                self._memory.view(tensor).copy_(values[name])


def build_lanes(
    trace: Trace,
    models: Sequence[RouteModel],
    device: str,
    arena: memoryview,
    layout: ArenaLayout,
    *,
    seed: int,
    weights_file: Path | None,
    trusted: bool,
) -> list[LaneMemory]:
    """The memories of all lanes on a device; builds only the weights that its kernels use."""
    used = set().union(*(_used_buffers(trace, model, device) for model in models))
    shared = materialise_weights(
        trace,
        [b for b in sorted(used) if trace.buffers[b].kind in ("weight", "constant")],
        weights_file,
        trusted,
    )
    lanes: list[LaneMemory] = []
    for model in models:
        runners = {
            (item.index, segment.index): segment_runners
            for item in model.programs
            for segment, segment_runners in _runners(trace, item, device, trusted)
        }
        for _ in range(model.slots):
            regions = {
                transfer: torch.frombuffer(
                    arena, dtype=torch.uint8, offset=offset, count=size
                ).untyped_storage()
                for (lane, transfer), (offset, size) in layout.regions.items()
                if lane == len(lanes) and size
            }
            lanes.append(LaneMemory(trace, model, device, shared, regions, runners, seed))
    return lanes


def output_digest(value: torch.Tensor) -> str:
    """sha256 of a tensor's elements in order, whatever its strides."""
    raw = value.contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(raw.tobytes()).hexdigest()


def token_values(binding: IoBinding, value: torch.Tensor) -> list[int] | None:
    """The token of each request where an output is one: an integer per request that feeds an input."""
    if binding.feeds is None or value.dtype.is_floating_point or value.numel() != value.shape[0]:
        return None
    return [int(token) for token in value.flatten().tolist()]


def _kernels(segments: Sequence[Segment]) -> frozenset[int]:
    return frozenset(kernel for segment in segments for kernel in segment.kernels)


def _used_buffers(trace: Trace, model: RouteModel, device: str) -> set[int]:
    """The buffers that kernels here touch, and those of outputs that are taken here."""
    used: set[int] = set()
    for item in model.programs:
        program = trace.program(item.name)
        buffers, here = kernel_buffers(trace, program), _kernels(item.segments.get(device, ()))
        used.update(*(buffers[kernel] for kernel in here))
        for binding in program.bindings("output").values():
            buffer = trace.tensors[binding.tensor].buffer
            if taken_after(trace, program, buffer) in here:
                used.add(buffer)
    return used


def _runners(
    trace: Trace, item: RouteProgram, device: str, trusted: bool
) -> Iterator[tuple[Segment, tuple[KernelRunner, ...]]]:
    """The kernels of each segment; each releases what nothing here needs after it."""
    program, segments = trace.program(item.name), item.segments.get(device, ())
    inner = local_buffers(trace, program)
    last = last_uses(trace, program, _kernels(segments))
    for segment in segments:
        runners = []
        for kernel in segment.kernels:
            # What the segment's last kernel used last may have to be sent: it is released after that.
            over = [] if kernel == segment.kernels[-1] else [b for b, user in last.items() if user == kernel]
            done = dict.fromkeys([*inner[kernel], *over])
            runners.append(KernelRunner(trace, program, kernel, trusted, local=tuple(done)))
        yield segment, tuple(runners)


def _spent(trace: Trace, program: Program, segments: Sequence[Segment]) -> dict[int, tuple[int, ...]]:
    """By segment: the buffers that nothing here needs once its sends have left."""
    last = last_uses(trace, program, _kernels(segments))
    return {
        segment.index: tuple(b for b, user in last.items() if user == segment.kernels[-1])
        for segment in segments
    }


def _outputs_taken(
    trace: Trace, program: Program, segments: Sequence[Segment]
) -> dict[int, tuple[IoBinding, ...]]:
    """The outputs whose value is there at the end of each segment."""
    taken: dict[int, tuple[IoBinding, ...]] = {}
    place = {kernel: segment.index for segment in segments for kernel in segment.kernels}
    for binding in program.bindings("output").values():
        kernel = taken_after(trace, program, trace.tensors[binding.tensor].buffer)
        if kernel in place:
            taken[place[kernel]] = (*taken.get(place[kernel], ()), binding)
    return taken


def _zeros(size: int) -> torch.UntypedStorage:
    return torch.zeros(size, dtype=torch.uint8).untyped_storage()


def _bytes(storage: torch.UntypedStorage, size: int) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,), (1,))


def _copy(
    source: torch.UntypedStorage,
    target: torch.UntypedStorage,
    boxes: Sequence[Box] | None,
    size: int,
) -> None:
    """Copy the first ``size`` bytes, or some boxes of them, to the same places."""
    if boxes is None:
        if size:
            _bytes(target, size).copy_(_bytes(source, size))
        return
    for box in boxes:
        shape = [count for count, _ in box.dims] + [box.run]
        strides = [stride for _, stride in box.dims] + [1]
        view = torch.empty(0, dtype=torch.uint8).set_(target, box.start, shape, strides)
        view.copy_(torch.empty(0, dtype=torch.uint8).set_(source, box.start, shape, strides))
