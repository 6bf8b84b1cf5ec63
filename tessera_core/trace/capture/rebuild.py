"""A CUDA graph built from a target's stored launches, with pointers filled in for buffers at any address."""

from __future__ import annotations

import ctypes
import struct
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tessera_core.trace.capture.driver import call, driver, parameter_layout
from tessera_core.trace.capture.graph import MEMCPY, MEMSET
from tessera_formats.errors import ArtifactError

Addresses = Callable[[int], int]
"""The base address of a buffer or workspace, by id."""


@dataclass(frozen=True, slots=True)
class StoredLaunch:
    """A launch with every pointer filled in. ``attributes``: as in the table ``launch_attributes``."""

    row: Mapping[str, Any]
    parameters: bytes
    attributes: frozenset[str]


def stored_launches(
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    program: int,
    buffer: Addresses,
    workspace: Addresses,
) -> dict[int, list[StoredLaunch]]:
    """The launches of a program by kernel, in order; ``rows``: a target's tables by short name."""
    extra: dict[tuple[int, int], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows["pointers"]:
        if row["program"] == program:
            extra[row["kernel"], row["launch"]].append(row)
    attributes: dict[tuple[int, int], set[str]] = defaultdict(set)
    for row in rows["launch_attributes"]:
        if row["program"] == program:
            attributes[row["kernel"], row["launch"]].add(row["attribute"])
    found: dict[int, list[StoredLaunch]] = defaultdict(list)
    mine = [row for row in rows["launches"] if row["program"] == program]
    for row in sorted(mine, key=lambda r: (int(r["kernel"]), int(r["launch"]))):
        key = (row["kernel"], row["launch"])
        block = bytearray(row["parameters"])
        for place in row["relocations"]:
            address = buffer(place["buffer"]) + place["byte_offset"]
            struct.pack_into("<Q", block, place["offset"], address)
        for place in extra[key]:
            address = workspace(place["workspace"]) + place["byte_offset"]
            struct.pack_into("<Q", block, place["offset"], address)
        found[row["kernel"]].append(StoredLaunch(row, bytes(block), frozenset(attributes[key])))
    return found


def build_graph(
    launches: Mapping[int, Sequence[StoredLaunch]],
    edges: Sequence[Mapping[str, Any]],
    functions: Mapping[tuple[str | None, str], int],
) -> Any:
    """A ``CUgraph`` that runs kernel after kernel, with the recorded order inside each.

    ``functions``: handles by (module hash, entry name). Raises :class:`ArtifactError` for a function that is
    not loaded here.
    """
    cuda = driver()
    graph = call(cuda.cuGraphCreate, 0)
    inner: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for edge in edges:
        inner[edge["kernel"]].append((edge["source"], edge["destination"]))
    ends: list[Any] = []
    for kernel in sorted(launches):
        nodes: list[Any] = []
        sources: dict[int, list[int]] = defaultdict(list)
        for source, destination in inner[kernel]:
            sources[destination].append(source)
        for number, launch in enumerate(launches[kernel]):
            before = [nodes[source] for source in sources[number]] or ends
            nodes.append(_add(graph, launch, before, functions))
        followed = {source for source, _ in inner[kernel]}
        ends = [node for number, node in enumerate(nodes) if number not in followed] or ends
    return graph


def _add(
    graph: Any,
    launch: StoredLaunch,
    before: list[Any],
    functions: Mapping[tuple[str | None, str], int],
) -> Any:
    cuda = driver()
    row = launch.row
    context = call(cuda.cuCtxGetCurrent)
    if row["kind"] == "memset":
        fill = cuda.CUDA_MEMSET_NODE_PARAMS()
        fields = MEMSET.unpack(launch.parameters)
        fill.dst, fill.value, fill.elementSize = cuda.CUdeviceptr(fields[0]), fields[1], fields[2]
        fill.width, fill.height, fill.pitch = fields[3:]
        return call(cuda.cuGraphAddMemsetNode, graph, before, len(before), fill, context)
    if row["kind"] == "memcpy":
        copy = cuda.CUDA_MEMCPY3D()
        destination, source, width, height, depth, *rows = MEMCPY.unpack(launch.parameters)
        copy.srcMemoryType = copy.dstMemoryType = cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.dstDevice, copy.srcDevice = cuda.CUdeviceptr(destination), cuda.CUdeviceptr(source)
        copy.WidthInBytes, copy.Height, copy.Depth = width, height, depth
        copy.dstPitch, copy.dstHeight, copy.srcPitch, copy.srcHeight = rows
        return call(cuda.cuGraphAddMemcpyNode, graph, before, len(before), copy, context)
    handle = functions.get((row["module"], row["function"]))
    if handle is None:
        raise ArtifactError(
            f"launch of {row['function']}: the function is not loaded here; capture on this machine"
        )
    node = cuda.CUDA_KERNEL_NODE_PARAMS()
    node.func = cuda.CUfunction(handle)
    node.gridDimX, node.gridDimY, node.gridDimZ = row["grid"]
    node.blockDimX, node.blockDimY, node.blockDimZ = row["block"]
    node.sharedMemBytes = row["shared_bytes"]
    # The driver copies the values when the node is added, so they need only live until then.
    values = ctypes.create_string_buffer(launch.parameters, max(len(launch.parameters), 1))
    start = ctypes.addressof(values)
    if "packed" in launch.attributes:
        size = ctypes.c_size_t(len(launch.parameters))
        table = (ctypes.c_void_p * 5)(1, start, 2, ctypes.addressof(size), 0)
        node.kernelParams, node.extra = 0, ctypes.addressof(table)
    else:
        offsets = [offset for offset, _ in parameter_layout(cuda.CUfunction(handle))]
        table = (ctypes.c_void_p * max(len(offsets), 1))(*(start + offset for offset in offsets))
        node.kernelParams, node.extra = ctypes.addressof(table), 0
    added = call(cuda.cuGraphAddKernelNode, graph, before, len(before), node)
    _set_attributes(added, row, launch.attributes)
    return added


def _set_attributes(node: Any, row: Mapping[str, Any], attributes: frozenset[str]) -> None:
    cuda = driver()
    ids = cuda.CUlaunchAttributeID
    if list(row["cluster"]) != [1, 1, 1]:
        value = cuda.CUkernelNodeAttrValue()
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = row["cluster"]
        call(cuda.cuGraphKernelNodeSetAttribute, node, ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value)
    if "cooperative" in attributes:
        value = cuda.CUkernelNodeAttrValue()
        value.cooperative = 1
        call(cuda.cuGraphKernelNodeSetAttribute, node, ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, value)


def load_ptx(modules: Sequence[Mapping[str, Any]], entries: Mapping[str, Sequence[str]]) -> dict[Any, int]:
    """Functions compiled by the driver from stored PTX, by (module hash, entry name).

    ``entries``: entry names by module hash. Dynamic shared memory is raised to the device's limit.
    """
    cuda = driver()
    found: dict[Any, int] = {}
    limit = call(
        cuda.cuDeviceGetAttribute,
        cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        call(cuda.cuCtxGetDevice),
    )
    for row in modules:
        if row["language"] != "ptx":
            continue
        module = call(cuda.cuModuleLoadData, row["text"].encode() + b"\0")
        for entry in entries.get(row["module"], ()):
            function = call(cuda.cuModuleGetFunction, module, entry.encode())
            attribute = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            static = call(
                cuda.cuFuncGetAttribute,
                cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
                function,
            )
            call(cuda.cuFuncSetAttribute, function, attribute, limit - static)
            found[row["module"], entry] = int(function)
    return found


def run_graph(graph: Any, stream: int, times: int = 1) -> None:
    """Instantiate a graph, launch it ``times`` times on a stream, wait, and destroy the instance."""
    cuda = driver()
    ready = call(cuda.cuGraphInstantiate, graph, 0)
    try:
        for _ in range(times):
            call(cuda.cuGraphLaunch, ready, cuda.CUstream(stream))
        call(cuda.cuStreamSynchronize, cuda.CUstream(stream))
    finally:
        call(cuda.cuGraphExecDestroy, ready)
