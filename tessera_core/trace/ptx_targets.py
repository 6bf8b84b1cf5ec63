"""Launches and modules of the user's Triton kernels for architectures that need not be at hand.

Each distinct specialisation is compiled to PTX once, in a process of its own. A launch's parameter bytes are
laid out as Triton passes them: every run-time parameter at its natural alignment, then two hidden pointers.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa

from tessera_core.ptx.normalise import module_hash
from tessera_core.trace.build import Traced
from tessera_core.trace.inner import Launch, Pointer
from tessera_core.trace.triton_launch import HELPER_SECONDS, kernel_location, kernel_target, run_helper
from tessera_formats.errors import InputError, UntracedLaunchError
from tessera_formats.trace import LAUNCH_EDGES, LAUNCHES, MODULES, POINTERS, WORKSPACES

_TARGET = re.compile(r"sm_(\d{2,3})")
# What Triton 3.7 compiles for; another number makes LLVM abort.
_ARCHITECTURES = (75, 80, 86, 87, 89, 90, 100, 103, 120, 121)
# Threads of a warp, on every architecture so far (PTX ISA, WARP_SZ).
_WARP_THREADS = 32
# Arena bases are aligned to this, so a pointer's alignment is that of its offset.
_ARENA_ALIGNMENT_BYTES = 256
# Triton passes two pointers after a kernel's own parameters: to global and to profiling scratch.
_HIDDEN_POINTERS = 2
# Each compiler is a process that fills one core and a few hundred megabytes.
_COMPILERS = 2
_FORMATS: Mapping[str, str] = {
    "i1": "?",
    "i8": "b",
    "i16": "h",
    "i32": "i",
    "i64": "q",
    "u8": "B",
    "u16": "H",
    "u32": "I",
    "u64": "Q",
    "fp16": "e",
    "fp32": "f",
    "fp64": "d",
}


def check_targets(targets: tuple[str, ...]) -> None:
    """Refuse what is not an architecture; raises :class:`InputError`."""
    for target in targets:
        match = _TARGET.fullmatch(target)
        if match is None or int(match[1]) not in _ARCHITECTURES:
            names = ", ".join(f"sm_{number}" for number in _ARCHITECTURES)
            raise InputError(
                f"PTX target {target!r}: is no architecture to compile for; choose among {names}"
            )


def target_tables(
    traced: Traced, targets: tuple[str, ...], progress: Callable[[str], None]
) -> dict[str, pa.Table]:
    """Tables ``targets/ARCH/launches``, ``modules``, ``launch_edges``, ``workspaces`` and ``pointers``, by name.

    What a custom op allocates for its launches is a workspace; its launches follow each other.

    Raises :class:`UntracedLaunchError` for a kernel that Triton cannot compile.
    """
    if not targets:
        return {}
    found = [(number, launch) for number, launches in enumerate(traced.launches) for launch in launches]
    jobs: dict[str, dict[str, Any]] = {}
    keys = []
    for _, launch in found:
        job = _job(launch)
        key = json.dumps(job, sort_keys=True)
        jobs.setdefault(key, job)
        keys.append(key)
    tables: dict[str, pa.Table] = {}
    order = list(jobs)
    wanted = list(dict.fromkeys(targets))
    progress(f"compiling {len(order)} Triton specialisations for {', '.join(wanted)}")
    names = ", ".join(dict.fromkeys(kernel_target(launch.kernel) for _, launch in found))

    advice = "correct the kernel, or leave out --ptx-target"

    def compile_for(target: str) -> list[dict[str, Any]]:
        if not order:
            return []
        request = {
            "architecture": int(target.removeprefix("sm_")),
            "jobs": [jobs[key] for key in order],
        }
        answer = run_helper(
            "tessera_core.trace.compile_ptx",
            request,
            names,
            {"TRITON_INTERPRET": "0"},
            advice,
            HELPER_SECONDS * len(order),
        )
        kernels: list[dict[str, Any]] = answer["kernels"]
        return kernels

    with ThreadPoolExecutor(max_workers=_COMPILERS) as pool:
        answers = dict(zip(wanted, pool.map(compile_for, wanted)))
    for target in wanted:
        compiled = dict(zip(order, answers[target]))
        rows = []
        edges: list[dict[str, int]] = []
        pointers: list[dict[str, int]] = []
        sizes: dict[int, int] = {}
        numbers: dict[tuple[int, int, int], int] = {}
        counts: dict[tuple[int, int], int] = {}
        for (number, launch), key in zip(found, keys):
            kernel = traced.trace.programs[number].ops[launch.op].kernel
            place = counts.get((number, kernel), 0)
            counts[number, kernel] = place + 1
            owner = {"program": number, "kernel": kernel}
            row, inner = _row(launch, compiled[key])
            rows.append({**owner, "launch": place, **row})
            for pointer in inner:
                key_of = (number, launch.op, pointer["workspace"])
                workspace = numbers.setdefault(key_of, len(numbers))
                pointers.append({**owner, "launch": place, **pointer, "workspace": workspace})
                sizes[workspace] = launch.workspaces[pointer["workspace"]]
            if place:
                edges.append({**owner, "source": place - 1, "destination": place})
        modules = {}
        for key in order:
            answer = compiled[key]
            name = module_hash(answer["ptx"])
            modules[name] = {
                "module": name,
                "raw_hash": hashlib.sha256(answer["ptx"].encode()).hexdigest(),
                "architecture": target,
                "language": "ptx",
                "source_hash": jobs[key]["source_hash"],
                "text": answer["ptx"],
            }
        tables[f"targets/{target}/launches"] = LAUNCHES.build(rows)
        tables[f"targets/{target}/modules"] = MODULES.build([modules[name] for name in sorted(modules)])
        if edges:
            tables[f"targets/{target}/launch_edges"] = LAUNCH_EDGES.build(edges)
        if sizes:
            scratch = [{"workspace": n, "bytes": sizes[n], "scope": "kernel"} for n in sorted(sizes)]
            tables[f"targets/{target}/workspaces"] = WORKSPACES.build(scratch)
            tables[f"targets/{target}/pointers"] = POINTERS.build(pointers)
    return tables


def _job(launch: Launch) -> dict[str, Any]:
    """One specialisation as JSON: pointers by dtype and alignment, other arguments by value.

    Values that do not specialise a kernel are left in; the compiling process knows which launches are alike.
    """
    arguments: dict[str, Any] = {}
    for name, value in launch.arguments.items():
        if isinstance(value, Pointer):
            arguments[name] = {"dtype": value.dtype, "offset": value.byte_offset % _ARENA_ALIGNMENT_BYTES}
        else:
            arguments[name] = {"value": value}
    return {
        **kernel_location(launch.kernel),
        "arguments": arguments,
        "options": launch.options,
        "source_hash": launch.kernel.cache_key,
    }


def _row(launch: Launch, compiled: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, int]]]:
    """A row of ``launches`` without its place, and the pointers into workspaces as the op numbers these."""
    parameters, relocations, pointers = parameter_block(
        compiled["signature"], launch.arguments, kernel_target(launch.kernel)
    )
    row = {
        "op": launch.op,
        "kind": "kernel",
        "module": module_hash(compiled["ptx"]),
        "function": compiled["name"],
        "grid": list(launch.grid),
        "block": [compiled["num_warps"] * _WARP_THREADS, 1, 1],
        "cluster": [compiled["num_ctas"], 1, 1],
        "shared_bytes": compiled["shared"],
        "parameters": parameters,
        "relocations": relocations,
    }
    return row, pointers


def parameter_block(
    signature: Mapping[str, Any], arguments: Mapping[str, Any], target: str
) -> tuple[bytes, list[dict[str, int]], list[dict[str, int]]]:
    """Parameter bytes with pointers zeroed, and where the address of which buffer and of which workspace goes.

    ``signature``: type of each parameter as compiled (``*bf16``, ``i32``, ``fp32``, ``constexpr``); constants
    take no room. bf16 scalars are passed as fp32's, as Triton's launcher does. Raises
    :class:`UntracedLaunchError` naming ``target`` for a parameter that is neither pointer nor number.
    """
    block = bytearray()
    relocations: list[dict[str, int]] = []
    pointers: list[dict[str, int]] = []
    for name, kind in signature.items():
        if kind == "constexpr":
            continue
        value = arguments[name]
        if not isinstance(kind, str) or not (kind.startswith("*") or kind in _FORMATS):
            raise UntracedLaunchError(
                f"{target}: parameter {name} has type {kind}, whose place in the parameters is not known;"
                " pass pointers and numbers, or leave out --ptx-target"
            )
        if kind.startswith("*"):
            block += bytes(-len(block) % 8)
            place = {"offset": len(block), "byte_offset": value.byte_offset}
            if value.workspace is None:
                relocations.append({**place, "buffer": value.buffer})
            else:
                pointers.append({**place, "workspace": value.workspace})
            block += bytes(8)
            continue
        packed = struct.pack("<" + _FORMATS[kind], value)
        block += bytes(-len(block) % len(packed)) + packed
    block += bytes(-len(block) % 8) + bytes(8 * _HIDDEN_POINTERS)
    return bytes(block), relocations, pointers
