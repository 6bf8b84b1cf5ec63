"""CUDA graphs through the driver: reading a captured one, and asking about addresses.

The only file that reads graphs with ``cuda-bindings`` (extra ``cuda``), which is imported when first used.
"""

from __future__ import annotations

import ctypes
from typing import Any

from tessera_core.trace.capture.graph import (
    MEMCPY,
    MEMSET,
    Extents,
    RawGraph,
    RawLaunch,
    topological,
    without_empty,
)
from tessera_formats.errors import InputError, UntracedLaunchError

_BUFFER_POINTER, _BUFFER_SIZE = 1, 2  # CU_LAUNCH_PARAM_BUFFER_POINTER and _SIZE of cuda.h


def driver() -> Any:
    """The module ``cuda.bindings.driver``; raises :class:`InputError` where it is not installed."""
    try:
        from cuda.bindings import driver as found
    except ImportError as problem:
        raise InputError(
            "capture needs cuda-bindings; run: pip install 'tessera-toolchain[cuda]'"
        ) from problem
    return found


def call(function: Any, *arguments: Any) -> Any:
    """Call a driver function and give what it returns after its status; None, one value or a tuple."""
    status, *values = function(*arguments)
    if int(status):
        raise UntracedLaunchError(
            f"{function.__name__}: the driver answers {status.name}; check the driver's version with nvidia-smi"
        )
    return values[0] if len(values) == 1 else tuple(values) or None


def nodes_while_capturing(stream: int) -> frozenset[int]:
    """Handles of the nodes that a stream's running capture holds so far; empty where it is not capturing."""
    cuda = driver()
    found = call(cuda.cuStreamGetCaptureInfo, cuda.CUstream(stream))
    if int(found[0]) != int(cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE):
        return frozenset()
    return frozenset(int(node) for node in _nodes(found[2]))


def read_graph(graph: int) -> RawGraph:
    """The launches, copies and fills of a ``CUgraph`` and the order between them; child graphs are entered.

    Raises :class:`UntracedLaunchError` for a node of another kind (host calls, conditionals, allocations).
    """
    cuda = driver()
    launches: list[RawLaunch] = []
    number: dict[int, int] = {}
    empty: set[int] = set()
    edges: list[tuple[int, int]] = []

    def enter(handle: Any) -> None:
        kind_of = cuda.CUgraphNodeType
        nodes = _nodes(handle)
        inner: dict[int, tuple[set[int], set[int]]] = {}
        for node in nodes:
            key = int(node)
            number[key] = len(number)
            kind = call(cuda.cuGraphNodeGetType, node)
            if kind == kind_of.CU_GRAPH_NODE_TYPE_KERNEL:
                launches.append(_kernel(node))
            elif kind == kind_of.CU_GRAPH_NODE_TYPE_MEMCPY:
                launches.append(_memcpy(node))
            elif kind == kind_of.CU_GRAPH_NODE_TYPE_MEMSET:
                launches.append(_memset(node))
            elif kind in (
                kind_of.CU_GRAPH_NODE_TYPE_EMPTY,
                kind_of.CU_GRAPH_NODE_TYPE_EVENT_RECORD,
                kind_of.CU_GRAPH_NODE_TYPE_WAIT_EVENT,
            ):
                empty.add(number[key])
            elif kind == kind_of.CU_GRAPH_NODE_TYPE_GRAPH:
                empty.add(number[key])
                child = call(cuda.cuGraphChildGraphNodeGetGraph, node)
                enter(child)
                members = {number[int(n)] for n in _nodes(child)}
                inner[number[key]] = (members, members)
            else:
                raise UntracedLaunchError(
                    f"the capture holds a node of kind {kind.name}, which cannot be replayed elsewhere;"
                    " register the call that makes it as a custom op"
                )
        for source, destination in _edges(handle):
            edges.append((number[source], number[destination]))
            # A child graph runs between its node's predecessors and successors.
            for member in inner.get(number[source], (set(), set()))[1]:
                edges.append((member, number[destination]))
            for member in inner.get(number[destination], (set(), set()))[0]:
                edges.append((number[source], member))

    enter(cuda.CUgraph(graph))
    place = {number[launch.node]: index for index, launch in enumerate(launches)}
    kept = {(place[s], place[d]) for s, d in without_empty(edges, empty)}
    order = topological(len(launches), kept)
    position = {old: new for new, old in enumerate(order)}
    return RawGraph(
        tuple(launches[index] for index in order),
        tuple(sorted((position[s], position[d]) for s, d in kept)),
    )


def allocation_of(address: int) -> tuple[int, int] | None:
    """(start, bytes) of the device allocation that holds an address; None where it is no device address."""
    cuda = driver()
    names = cuda.CUpointer_attribute
    found = []
    for name in ("MEMORY_TYPE", "RANGE_START_ADDR", "RANGE_SIZE"):
        status, value = cuda.cuPointerGetAttribute(
            getattr(names, f"CU_POINTER_ATTRIBUTE_{name}"), cuda.CUdeviceptr(address)
        )
        if int(status):
            return None
        found.append(int(value))
    if found[0] != int(cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE):
        return None
    return found[1], found[2]


def _nodes(graph: Any) -> list[Any]:
    cuda = driver()
    count = call(cuda.cuGraphGetNodes, graph)[1]
    return list(call(cuda.cuGraphGetNodes, graph, count)[0])[:count] if count else []


def _edges(graph: Any) -> list[tuple[int, int]]:
    """Edges by the query that also knows programmatic ones (with their data); these count as full edges."""
    cuda = driver()
    count = call(cuda.cuGraphGetEdges, graph)[-1]
    if not count:
        return []
    found = call(cuda.cuGraphGetEdges, graph, count)
    return [(int(source), int(destination)) for source, destination in zip(found[0], found[1])][:count]


def _kernel(node: Any) -> RawLaunch:
    cuda = driver()
    given = call(cuda.cuGraphKernelNodeGetParams, node)
    # Libraries that load kernels independently of a context leave a CUkernel here; its function is this context's.
    function = given.func if int(given.func) else call(cuda.cuKernelGetFunction, given.kern)
    named = call(cuda.cuFuncGetName, function)
    layout = parameter_layout(function)
    packed = bool(int(given.extra))
    parameters = _packed(int(given.extra)) if packed else _gathered(int(given.kernelParams), layout)
    ids = cuda.CUlaunchAttributeID
    # The fields of an attribute's value point into it, so the value has to outlive their reading.
    shape = call(cuda.cuGraphKernelNodeGetAttribute, node, ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
    cluster = shape.clusterDim
    together = call(cuda.cuGraphKernelNodeGetAttribute, node, ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
    cooperative = together.cooperative
    return RawLaunch(
        node=int(node),
        kind="kernel",
        function=named.decode() if isinstance(named, bytes) else str(named),
        handle=int(function),
        grid=(given.gridDimX, given.gridDimY, given.gridDimZ),
        block=(given.blockDimX, given.blockDimY, given.blockDimZ),
        cluster=(max(cluster.x, 1), max(cluster.y, 1), max(cluster.z, 1)),
        shared_bytes=int(given.sharedMemBytes),
        cooperative=bool(cooperative),
        parameters=parameters,
        layout=layout,
        packed=packed,
    )


def parameter_layout(function: Any) -> tuple[tuple[int, int], ...]:
    """(offset, bytes) of each parameter of a ``CUfunction``, the first at 0 as PTX lays them out.

    The driver counts from where its own bank of constants begins, so that a first parameter that wants 64 bytes of
    alignment (a tensor map) has offset 48 there (seen on an H200, CUDA 13.0).
    """
    cuda = driver()
    found: list[tuple[int, int]] = []
    while True:  # asked one by one until there is none
        status, offset, size = cuda.cuFuncGetParamInfo(function, len(found))
        if int(status):
            first = found[0][0] if found else 0
            return tuple((offset - first, size) for offset, size in found)
        found.append((int(offset), int(size)))


def _gathered(table: int, layout: tuple[tuple[int, int], ...]) -> bytes:
    """The parameter block from ``kernelParams``: a table of pointers to the values."""
    block = bytearray(max((offset + size for offset, size in layout), default=0))
    entries = ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p))
    for index, (offset, size) in enumerate(layout):
        block[offset : offset + size] = ctypes.string_at(entries[index], size)
    return bytes(block)


def _packed(table: int) -> bytes:
    """The parameter block from ``extra``: tagged pairs that end with 0."""
    entries = ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p))
    start = size = index = 0
    while (tag := entries[index] or 0) != 0:
        value = entries[index + 1] or 0
        if tag == _BUFFER_POINTER:
            start = value
        elif tag == _BUFFER_SIZE:
            size = ctypes.cast(value, ctypes.POINTER(ctypes.c_size_t))[0]
        index += 2
    return ctypes.string_at(start, size)


def _plain(kind: Any, node: Any, name: str, parameters: bytes) -> RawLaunch:
    one: Extents = (1, 1, 1)
    return RawLaunch(
        node=int(node),
        kind=kind,
        function=name,
        handle=0,
        grid=one,
        block=one,
        cluster=one,
        shared_bytes=0,
        cooperative=False,
        parameters=parameters,
        layout=(),
    )


def _memcpy(node: Any) -> RawLaunch:
    cuda = driver()
    copy = call(cuda.cuGraphMemcpyNodeGetParams, node)
    kinds = cuda.CUmemorytype
    for side in (copy.srcMemoryType, copy.dstMemoryType):
        if side not in (kinds.CU_MEMORYTYPE_DEVICE, kinds.CU_MEMORYTYPE_UNIFIED):
            raise UntracedLaunchError(
                f"the capture holds a copy from or to {side.name}, which cannot be replayed elsewhere;"
                " keep what the step reads on the device"
            )
    destination = (
        int(copy.dstDevice) + copy.dstXInBytes + copy.dstPitch * (copy.dstY + copy.dstZ * copy.dstHeight)
    )
    source = int(copy.srcDevice) + copy.srcXInBytes + copy.srcPitch * (copy.srcY + copy.srcZ * copy.srcHeight)
    flat = copy.Height <= 1 and copy.Depth <= 1
    rows = (0, 0, 0, 0) if flat else (copy.dstPitch, copy.dstHeight, copy.srcPitch, copy.srcHeight)
    block = MEMCPY.pack(
        destination, source, copy.WidthInBytes, max(copy.Height, 1), max(copy.Depth, 1), *rows
    )
    return _plain("memcpy", node, "memcpy", block)


def _memset(node: Any) -> RawLaunch:
    fill = call(driver().cuGraphMemsetNodeGetParams, node)
    pitch = 0 if fill.height <= 1 else fill.pitch
    block = MEMSET.pack(int(fill.dst), fill.value, fill.elementSize, fill.width, max(fill.height, 1), pitch)
    return _plain("memset", node, "memset", block)
