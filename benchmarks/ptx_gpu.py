"""Observes on a GPU what the stored kernels touch: `python -m benchmarks.ptx_gpu --output FOLDER`. The result,
``ptx_gpu.json.xz``, is a fixture that `benchmarks.ptx_soundness` holds the analysis against where there is no GPU.

Four parts: instrumented PTX of the suite's launches (every access notes its bytes); the poison test of the same
launches with what was seen as claims, tensor memory accesses by what Triton's interpreter saw; instrumented PTX of
captured launches, and the poison test of the captured kernels with their deps as claims, libraries' binaries included;
tensor maps as the driver encodes them. What one part finds is written before the next begins.
"""

from __future__ import annotations

import argparse
import json
import lzma
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import Bar, report
from fixtures.ptx import archive
from fixtures.ptx.archive import StoredLaunch as SuiteLaunch
from tessera_core.program.boxes import Box
from tessera_core.program.store import trace_from_bundle
from tessera_core.trace.capture.driver import call, driver
from tessera_core.trace.capture.rebuild import StoredLaunch, build_graph, load_ptx, run_graph
from tessera_core.trace.capture.stage import machine_facts
from tessera_core.validate.poison import Claims, poison_test
from tessera_core.validate.target import Iteration, validate_target
from tessera_formats.trace import read_trace
from tests.ptx.oracle.instrument import ARENA, instrument

DEVICE = "cuda:0"
ALIGNMENT_BYTES = 256
GUARD_BYTES = 512  # between two buffers of an arena, so that a byte too far is seen as such
APART = (
    "descriptor_copy.sm_90",
    "descriptor_matmul.sm_90",
    "device_descriptor_matmul.sm_90",
)  # tensor memory
BUILDS = ("sm_90", "sm_80", "nvcc.sm_90a", "nvcc.sm_90a.lineinfo", "nvcc.sm_80")
CAPTURES = ("llama-tiny", "demo")
LAUNCHES_BAR = 100
TENSOR_SHAPES: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((64,), (32,)),
    ((40, 48), (8, 16)),
    ((5, 33, 64), (1, 8, 16)),
    ((3, 4, 5, 32), (1, 2, 3, 16)),
    ((2, 3, 4, 5, 32), (1, 1, 2, 3, 16)),
    ((1000, 2048), (64, 16)),
)

Found = dict[str, Any]


class Arena:
    """Buffers side by side on the device, with a map of reads and a map of writes, a byte per byte."""

    def __init__(self, sizes: Mapping[int, int]) -> None:
        self.places: dict[int, tuple[int, int]] = {}
        at = 0
        for buffer, size in sizes.items():
            self.places[buffer] = (at, size)
            at += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES + GUARD_BYTES
        self.held = torch.zeros(at, dtype=torch.uint8, device=DEVICE)
        self.maps = torch.zeros((2, at), dtype=torch.uint8, device=DEVICE)

    def view(self, buffer: int) -> torch.Tensor:
        """The bytes of one buffer."""
        at, size = self.places[buffer]
        return self.held[at : at + size]

    def words(self) -> bytes:
        """What the module variable of instrumented PTX holds."""
        maps = [self.maps[mode].data_ptr() for mode in (0, 1)]
        return struct.pack("<4Q", self.held.data_ptr(), len(self.held), *maps)

    def seen(self) -> tuple[dict[str, dict[str, list[int]]], int]:
        """Runs touched per mode and buffer, and how many bytes outside all buffers were."""
        found: dict[str, dict[str, list[int]]] = {"read": {}, "write": {}}
        outside = 0
        for mode, marks in zip(found, self.maps.cpu().numpy() != 0):
            for buffer, (at, size) in self.places.items():
                if marks[at : at + size].any():
                    found[mode][str(buffer)] = intervals(marks[at : at + size])
                marks[at : at + size] = False
            outside += int(marks.sum())
        return found, outside


def intervals(marks: Any) -> list[int]:
    """Starts and ends of the marked runs, alternating."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], marks.astype(np.int8), [0]))))
    return [int(edge) for edge in edges]


def boxes(runs: list[int]) -> tuple[Box, ...]:
    """The runs as boxes."""
    return tuple(Box.interval(low, high - low) for low, high in zip(runs[::2], runs[1::2]))


def loaded(text: str) -> Any:
    """A module compiled by the driver."""
    return call(driver().cuModuleLoadData, text.encode() + b"\0")


def functions_of(name: str, text: str, entries: list[str]) -> dict[Any, int]:
    """Functions of a module by (name, entry)."""
    return load_ptx([{"module": name, "text": text, "language": "ptx"}], {name: entries})


def variable(function: int, content: bytes) -> None:
    """Fill the arena variable of the module that a function belongs to."""
    cuda = driver()
    module = call(cuda.cuFuncGetModule, cuda.CUfunction(function))
    place, size = call(cuda.cuModuleGetGlobal, module, ARENA.encode())
    assert size >= len(content)
    call(cuda.cuMemcpyHtoD, place, content, len(content))


def encoded(descriptor: Mapping[str, Any], address: int) -> bytes:
    """The tensor map of a Triton descriptor, by the driver; extents innermost first, as it wants them."""
    cuda = driver()
    item = int(descriptor["elem_size"])
    rank = len(descriptor["shape"])
    shape = [int(s) for s in reversed(descriptor["shape"])]
    strides = [int(s) * item for s in reversed(descriptor["strides"])][1:]
    box = [int(b) for b in reversed(descriptor["block_size"])]
    found = call(
        cuda.cuTensorMapEncodeTiled,
        cuda.CUtensorMapDataType(int(descriptor["elem_type"])),
        rank,
        address,
        [cuda.cuuint64_t(s) for s in shape],
        [cuda.cuuint64_t(s) for s in strides],
        [cuda.cuuint32_t(b) for b in box],
        [cuda.cuuint32_t(1)] * rank,
        cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        cuda.CUtensorMapSwizzle(int(descriptor["swizzle"])),
        cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return struct.pack("<16Q", *(int(word) for word in found.opaque))


def stored(launch: SuiteLaunch, address: Callable[[int], int]) -> StoredLaunch:
    """A suite's launch as the rebuilder wants it, pointers and tensor maps filled in."""
    block = bytearray(launch.parameters)
    for at, buffer, offset in launch.relocations:
        struct.pack_into("<Q", block, at, address(buffer) + offset)
    for descriptor in launch.descriptors:
        at = int(descriptor["offset"])
        block[at : at + 128] = encoded(descriptor, address(int(descriptor["buffer"])))
    row = {
        "kind": "kernel",
        "module": launch.module,
        "function": launch.entry,
        "grid": launch.grid,
        "block": launch.block,
        "shared_bytes": launch.shared_bytes,
        "cluster": [1, 1, 1],
    }
    return StoredLaunch(row, bytes(block), frozenset())


def run(launch: StoredLaunch, functions: Mapping[Any, int]) -> None:
    """Run one launch alone and wait for it."""
    graph = build_graph({0: [launch]}, [], functions)
    torch.cuda.synchronize()
    run_graph(graph, 0)
    call(driver().cuGraphDestroy, graph)


def suite_launches(part: str) -> Iterator[tuple[str, list[SuiteLaunch]]]:
    """By module, the launches of a part: of one build, or of one module that is a part by itself."""
    found: dict[str, list[SuiteLaunch]] = {}
    for launch in archive.launches():
        build = launch.module.partition(".")[2]
        if launch.module == part or (build == part and launch.module not in APART):
            found.setdefault(launch.module, []).append(launch)
    yield from found.items()


def observe_suite(part: str, deadline: float, found: list[Found]) -> None:
    """Add both observations of each launch of a part to ``found``."""
    interpreted = archive.observed() if archive.OBSERVED.exists() else {}
    for name, launches in suite_launches(part):
        if time.perf_counter() > deadline:
            print(f"time is up before {name}", file=sys.stderr)
            break
        text = archive.modules()[name].text
        noted = instrument(text)
        entries = sorted({launch.entry for launch in launches})
        plain = functions_of(name, text, entries)
        noting = functions_of(name, noted.text, entries)
        for launch in launches:
            unseen = unseen_in(text, launch.entry)
            try:
                found.append(observe(launch, plain, noting, unseen, interpreted))
            except Exception as problem:
                raise RuntimeError(f"{name} {launch.kernel} launch {launch.launch}: {problem}") from problem


def unseen_in(text: str, entry: str) -> tuple[str, ...]:
    """Opcodes of one kernel whose accesses instrumented PTX does not note."""
    head = ".version 8.0\n.target sm_90\n.address_size 64\n"
    return instrument(head + archive.entry_text(text, entry)).unseen


def observe(
    launch: SuiteLaunch,
    plain: Mapping[Any, int],
    noting: Mapping[Any, int],
    unseen: tuple[str, ...],
    interpreted: Mapping[str, Any],
) -> Found:
    """What one launch touched, and the poison test with it as claims."""
    arena = Arena(launch.sizes())
    numbers = launch.sizes()
    given = archive.contents(launch, 0, {b: arena.view(b).data_ptr() for b in numbers})
    for buffer, content in given.items():
        arena.view(buffer).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    ready = stored(launch, lambda buffer: arena.view(buffer).data_ptr())
    if not unseen:  # else the whole launch is left to the poison test
        variable(noting[launch.module, launch.entry], arena.words())
        run(ready, noting)
    seen, outside = arena.seen()
    found: Found = {
        "module": launch.module,
        "kernel": launch.kernel,
        "launch": launch.launch,
        "seen": seen,
        "outside": outside,
        "unseen": list(unseen),
    }
    claimed = seen
    if unseen:
        order = {buffer: str(index) for index, buffer in enumerate(launch.buffers)}
        known = interpreted.get(launch.kernel)
        if known is None:
            return found
        claimed = {
            mode: {order[b]: runs for b, runs in known[launch.launch][mode].items()}
            for mode in ("read", "write")
        }
        if "scratch" in order:  # descriptors that the kernel builds and reads back
            for mode in ("read", "write"):
                claimed[mode][order["scratch"]] = [0, launch.buffers["scratch"]]
    found["poison"] = poison(launch, arena, given, claimed, plain)
    return found


def poison(
    launch: SuiteLaunch,
    arena: Arena,
    given: Mapping[int, bytes],
    claimed: Mapping[str, Mapping[str, list[int]]],
    plain: Mapping[Any, int],
) -> Found:
    """The poison test of a launch, run in the arena; the guards between buffers are a buffer with no claims. What a
    table of pointers leads to moves nowhere, because every run happens at the same addresses."""
    for buffer, content in given.items():
        arena.view(buffer).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    shift = {buffer: at for buffer, (at, _) in arena.places.items()}

    def moved(mode: str) -> dict[int, tuple[Box, ...]]:
        every = [
            Box(box.start + shift[int(buffer)], box.dims, box.run)
            for buffer, runs in claimed[mode].items()
            for box in boxes(runs)
        ]
        return {0: tuple(every)}

    ready = stored(launch, lambda buffer: arena.view(buffer).data_ptr())
    # A scratch that the kernel fills and reads back is no claim worth testing byte by byte.
    must = moved("write")
    if "scratch" in launch.buffers:
        low, size = arena.places[list(launch.buffers).index("scratch")]
        must = {0: tuple(box for box in must[0] if not low <= box.start < low + size)}

    def execute(contents: Mapping[int, torch.Tensor]) -> None:
        arena.held.copy_(contents[0])
        run(ready, plain)
        contents[0].copy_(arena.held)

    claims = Claims(reads=moved("read"), writes=moved("write"), must=must)
    ordered = not archive.order_matters(launch)
    result = poison_test({0: arena.held.clone()}, claims, execute, ordered=ordered)
    return {**asdict(result), "holds": result.holds, "ordered": ordered}


def observe_captured(name: str) -> tuple[list[Found], Found]:
    """Captured launches with PTX, instrumented, in program order; and the poison test of every kernel."""
    from benchmarks.capture.subjects import subject
    from tessera_core.trace.capture.stage import CaptureStage

    bundle = read_trace(Path(f"fixtures/captures/{name}.trace"))
    trace = trace_from_bundle(bundle)
    target = bundle.targets()[0]
    session = CaptureStage(device=DEVICE).capture(subject(name).trace())[2]
    facts = validate_target(trace, bundle, target, functions=session.handles, progress=progress)
    tables = ("launches", "launch_edges", "pointers", "workspaces", "launch_attributes", "modules")
    rows = {table: bundle.table(f"targets/{target}/{table}").to_pylist() for table in tables}
    entries: dict[str, set[str]] = {}
    for row in rows["launches"]:
        if row["module"] is not None:
            entries.setdefault(row["module"], set()).add(row["function"])
    noting: dict[Any, int] = {}
    unseen: dict[str, tuple[str, ...]] = {}
    for row in rows["modules"]:
        if row["language"] == "ptx" and row["module"] in entries:
            noted = instrument(row["text"])
            unseen[row["module"]] = noted.unseen
            noting |= functions_of(row["module"], noted.text, sorted(entries[row["module"]]))
    plain = {**functions_from(rows, entries), **session.handles}
    found: list[Found] = []
    for program in trace.programs:
        iteration = Iteration(trace, program, rows, plain, DEVICE)
        arena = Arena({buffer: len(content) for buffer, content in iteration.memory.items()})
        for buffer, content in iteration.memory.items():
            arena.view(buffer).copy_(content)
        iteration.memory = {buffer: arena.view(buffer) for buffer in iteration.memory}
        iteration.launches = iteration.bound(iteration.memory)
        for kernel in program.kernels:
            for number, launch in enumerate(iteration.launches.get(kernel.id, ())):
                key = (launch.row["module"], launch.row["function"])
                if key not in noting and key not in plain and launch.row["kind"] == "kernel":
                    continue
                if key in noting:
                    arena.maps.zero_()
                    variable(noting[key], arena.words())
                iteration.run(kernel.id, [launch], (), {**plain, **noting})
                if key in noting:
                    seen, outside = arena.seen()
                    place = {"trace": name, "target": target, "program": program.id, "kernel": kernel.id}
                    noticed = {"seen": seen, "outside": outside, "unseen": list(unseen[str(key[0])])}
                    found.append({**place, "launch": number, "module": key[0], **noticed})
    return found, {"trace": name, **facts.as_json()}


def functions_from(rows: Mapping[str, Any], entries: Mapping[str, set[str]]) -> dict[Any, int]:
    """Functions of all stored PTX."""
    return load_ptx(rows["modules"], {module: sorted(found) for module, found in entries.items()})


def tensor_maps() -> list[Found]:
    """Tensor maps as the driver encodes them, fields apart: the layout is not documented."""
    held = torch.zeros(1 << 22, dtype=torch.uint8, device=DEVICE)
    found = []
    sizes = {0: 1, 1: 2, 2: 4, 6: 2, 7: 4, 8: 8, 9: 2}  # CUtensorMapDataType: bytes of an item
    cases = [
        (kind, shape, box, swizzle, offset)
        for kind in sizes
        for shape, box in TENSOR_SHAPES
        for swizzle in (0, 1)
        for offset in (0, 4096)
    ]
    for kind, shape, box, swizzle, offset in cases:
        item = sizes[kind]
        padded = [*shape[:-1], -(-shape[-1] * item // 16) * 16 // item]
        strides = [int(np.prod(padded[i + 1 :], dtype=np.int64)) for i in range(len(shape))]
        given: Found = {
            "shape": list(shape),
            "strides": strides,
            "block_size": list(box),
            "elem_size": item,
            "elem_type": kind,
            "swizzle": swizzle,
        }
        address = held.data_ptr() + offset
        try:
            content = encoded(given, address)
        except Exception as problem:
            found.append({**given, "refused": str(problem)})
            continue
        found.append({**given, "address": address, "bytes": content.hex()})
    return found


def progress(message: str) -> None:
    """To stderr."""
    print(message, file=sys.stderr, flush=True)


def work(part: str, seconds: float) -> Found:
    """What one part finds, up to where it fails."""
    torch.zeros(1, device=DEVICE)
    found: Found = {}
    try:
        if part == "tensor maps":
            found |= {"machine": machine_facts(DEVICE, compiled=True), "tensor_maps": tensor_maps()}
        elif part in CAPTURES:
            launches, validated = observe_captured(part)
            found |= {"captured": launches, "validated": [validated]}
        else:
            observe_suite(part, time.perf_counter() + seconds, found.setdefault("suite", []))
    except Exception as problem:
        found["problems"] = [f"{part}: {type(problem).__name__}: {problem}"[:2000]]
    return found


def read(path: Path) -> Found:
    """A stored result; nothing where a part wrote none."""
    if not path.exists():
        return {}
    found: Found = json.loads(lzma.decompress(path.read_bytes()))
    return found


def save(path: Path, found: Mapping[str, Any]) -> None:
    """Write a result, compressed."""
    text = json.dumps(found, separators=(",", ":"), sort_keys=True)
    path.write_bytes(lzma.compress(text.encode(), preset=9))


def main() -> int:
    """Observe everything, each part in a process of its own: a bad access ends only its part. 0 where all holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=180.0, help="limit for each part")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder: Path = arguments.output
    if arguments.part:
        save(folder / f"{arguments.part}.part", work(arguments.part, arguments.seconds))
        return 0
    parts = ("tensor maps", *CAPTURES, *BUILDS, *APART)
    command = [
        sys.executable,
        "-m",
        "benchmarks.ptx_gpu",
        "--output",
        str(folder),
        "--seconds",
        str(arguments.seconds),
    ]
    running = {part: subprocess.Popen([*command, "--part", part], stdout=sys.stderr) for part in parts}
    found: Found = {"suite": [], "captured": [], "validated": [], "problems": []}
    for part, process in running.items():
        try:
            ended = process.wait(arguments.seconds + 60)
        except subprocess.TimeoutExpired:
            process.kill()
            ended = process.wait()
        if ended:
            found["problems"].append(f"{part}: ended with {ended}")
        path = folder / f"{part}.part"
        for key, value in read(path).items():
            found[key] = [*found[key], *value] if key in found else value
        path.unlink(missing_ok=True)
        save(folder / "ptx_gpu.json.xz", found)
    return summary(found)


def summary(found: Found) -> int:
    """Print what was found, against the bars."""
    refuted = [e for e in found["suite"] if not e.get("poison", {"holds": True})["holds"]]
    kernels = sum(v["kernels_refuted"] for v in found["validated"])
    observed = len(found["suite"]) + len(found["captured"])
    outside = sum(e["outside"] for e in (*found["suite"], *found["captured"]))
    results = {
        "suite_launches": len(found["suite"]),
        "suite_kernels": len({e["kernel"] for e in found["suite"]}),
        "poisoned_launches": sum("poison" in e for e in found["suite"]),
        "captured_launches": len(found["captured"]),
        "validated": found["validated"],
        "problems": found["problems"],
        "refuted": [[e["module"], e["kernel"], e["launch"], e["poison"]["where"]] for e in refuted][:40],
    }
    bars = [
        Bar("launches observed", observed, f">= {LAUNCHES_BAR}", observed >= LAUNCHES_BAR),
        Bar("bytes touched outside every buffer", outside, "= 0", outside == 0),
        Bar("launches of the suite that the poison test refutes", len(refuted), "= 0", not refuted),
        Bar("captured kernels whose deps the poison test refutes", kernels, "= 0", not kernels),
        Bar("parts that failed", len(found["problems"]), "= 0", not found["problems"]),
    ]
    return report("ptx_gpu", results, bars, str(found.get("machine", {}).get("device", "no GPU")))


if __name__ == "__main__":
    sys.exit(main())
