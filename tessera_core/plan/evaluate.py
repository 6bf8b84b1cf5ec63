"""The independent checker of plans. It shares no code with the solvers or their cost model, so that a mistake
must be made twice to go unseen.

:func:`defects` holds a plan against its trace and deps and lists what is wrong in words; links, overheads and
kernel times are taken from the plan itself, and :func:`input_defects` holds those against the profile and the
cluster that the plan was made from. :mod:`tessera_core.plan.figures` derives the figures.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from tessera_core.deps.graph import Deps, Edge
from tessera_core.execute.cycle import Pace
from tessera_core.plan.figures import (
    Evaluation,
    RouteView,
    evaluate,
    families_of,
    feeding_outputs,
    objective_us,
    speed,
)
from tessera_core.plan.ir import Plan
from tessera_core.program.boxes import covers, union_bytes
from tessera_core.program.ir import Program, Trace

TOLERANCE = 1e-6
"""Relative difference that sums of the same terms in another order may show."""


def defects(plan: Plan, trace: Trace, deps: Deps) -> list[str]:
    """Everything that is wrong with a plan, one line each; empty for a sound one."""
    found = structure_defects(plan, trace, deps) or statement_defects(plan)
    found += [f"no {name} is stated" for name in ("link", "overhead") if name not in plan.facts]
    found += _cycle_defects(plan)
    if found:
        return found  # figures of a broken structure mean nothing
    real = evaluate(plan, trace, deps)
    stated = plan.facts["prediction"]
    rows = {(row["route"], row["program"]): row for row in stated["intervals"]}
    for it in real.iterations:
        row = rows[it.route, it.program]
        for name in ("resource_us", "latency_us", "interval_us"):
            _compare(found, f"route {it.route}, {it.program}: {name}", row[name], getattr(it, name))
    cycles = {row["route"]: row for row in stated["cycles"]}
    for item in real.cycles:
        for name in ("resource_us", "latency_us", "interval_us"):
            what = f"route {item.route}: {name} of the cycle"
            _compare(found, what, cycles[item.route][name], getattr(item, name))
        if cycles[item.route]["simulated_us"] < item.interval_us * (1 - TOLERANCE):
            found.append(f"route {item.route}: simulated_us of the cycle is below its bound")
    if found:
        return found
    paces = {
        route: Pace(cycle_us=row["simulated_us"], token_us=row["token_us"]) for route, row in cycles.items()
    }
    pace = speed(plan.routes, paces)
    _compare(found, "tokens_per_s", stated["tokens_per_s"], pace.tokens_per_s)
    _compare(found, "time_per_token_us", stated["time_per_token_us"], pace.time_per_token_us)
    _compare(found, "objective_us", stated["objective_us"], objective_us(plan, real))
    if stated["lower_bound_us"] > stated["objective_us"] * (1 + TOLERANCE):
        found.append("lower_bound_us is above objective_us")
    elif stated["lower_bound_us"] > 0:
        gap = stated["objective_us"] / stated["lower_bound_us"] - 1
        if abs(gap - stated["gap"]) > 1e-6:
            found.append(f"gap is {stated['gap']}, should be {gap}")
    for route, requests in zip(plan.routes, pace.requests_per_s, strict=True):
        _compare(found, f"route {route.route}: share", route.share, requests / sum(pace.requests_per_s))
    return found + _memory_defects(plan, real)


def structure_defects(plan: Plan, trace: Trace, deps: Deps) -> list[str]:
    """Placement, homes, transfers and their order: what makes a plan wrong whatever its figures."""
    found: list[str] = []
    devices = {device.name for device in plan.devices}
    names = {program.name for program in trace.programs}
    numbers = {route.route for route in plan.routes}
    used = {row.route for row in plan.assignments} | {row.route for row in plan.transfers}
    for number in sorted((used | {row.route for row in plan.homes}) - numbers):
        found.append(f"rows of unknown route {number}")
    for route in plan.routes:
        unknown = [name for name in route.programs if name not in names]
        if unknown or not route.programs or len(route.rates) != len(route.programs):
            found.append(f"route {route.route}: programs {list(route.programs)} don't fit trace and rates")
            continue
        view = RouteView(plan, route, trace)
        found += _placement_defects(view, devices, plan)
        if found:
            continue
        found += _home_defects(view, trace, deps)
        found += _sharing_defects(view, trace, deps)
        found += _transfer_defects(view, trace, deps)
    return found


def statement_defects(plan: Plan) -> list[str]:
    """What a plan should state for its figures to be used, and doesn't: an interval for each program of a route,
    and where it states links and overheads at all, one for each pair that a transfer crosses and each device in use.
    """
    found: list[str] = []
    expected = Counter((route.route, name) for route in plan.routes for name in route.programs)
    intervals = Counter((row["route"], row["program"]) for row in plan.facts["prediction"]["intervals"])
    for number, name in sorted(expected | intervals):
        held = intervals[number, name]
        if held != 1 or not expected[number, name]:
            what = (
                "interval of nothing"
                if held and not expected[number, name]
                else f"{held or 'no'} intervals stated"
            )
            found.append(f"route {number}, {name}: {what}")
    if "link" in plan.facts:
        links = Counter((row["source"], row["destination"]) for row in plan.facts["link"])
        for source, destination in sorted(
            {(row.source, row.destination) for row in plan.transfers} | set(links)
        ):
            if links[source, destination] != 1:
                found.append(
                    f"{links[source, destination] or 'no'} links stated from {source} to {destination}"
                )
    if "overhead" in plan.facts:
        overheads = Counter(row["device"] for row in plan.facts["overhead"])
        for device in sorted({row.device for row in plan.assignments} | set(overheads)):
            if overheads[device] != 1:
                found.append(f"{overheads[device] or 'no'} segment overheads stated for {device}")
    return found


def _cycle_defects(plan: Plan) -> list[str]:
    """Whether each route states its cycle once."""
    stated = Counter(row["route"] for row in plan.facts["prediction"].get("cycles", ()))
    expected = Counter(route.route for route in plan.routes)
    return [
        f"route {number}: {stated[number] or 'no'} cycles stated"
        for number in sorted(expected | stated)
        if stated[number] != expected[number]
    ]


def input_defects(
    plan: Plan,
    trace: Trace,
    kernel_us: Callable[[str, str], float],
    links: Mapping[tuple[str, str], Any],
    overheads: Mapping[str, float],
    capacities: Mapping[str, int],
) -> list[str]:
    """Where the plan's inputs differ from profile and cluster.

    ``kernel_us(signature, device type)``; ``links`` by pair of device names; ``overheads`` by type;
    ``capacities`` by device name.
    """
    found: list[str] = []
    types = {device.name: device.type for device in plan.devices}
    for row in plan.assignments:
        signature = trace.program(row.program).kernels[row.kernel].signature
        what = f"route {row.route}, {row.program}, kernel {row.kernel} on {row.device}: time_us"
        _compare(found, what, row.time_us, kernel_us(signature, types[row.device]))
    for device in plan.devices:
        if capacities.get(device.name) != device.capacity_bytes:
            found.append(f"device {device.name}: capacity_bytes is {device.capacity_bytes}")
    for row in plan.facts["overhead"]:
        real_us = overheads.get(types.get(row["device"], ""))
        if real_us is None:
            found.append(f"overhead of {row['device']}, which cluster and profile lack")
        else:
            _compare(found, f"overhead of {row['device']}", row["overhead_us"], real_us)
    for row in plan.facts["link"]:
        link = links.get((row["source"], row["destination"]))
        if link is None:
            found.append(f"link {row['source']} to {row['destination']}, which cluster and profile lack")
            continue
        for name in ("latency_us", "gbit_per_s", "send_us", "receive_us"):
            what = f"link {row['source']} to {row['destination']}: {name}"
            _compare(found, what, row[name], getattr(link, name))
    return found


def _placement_defects(view: RouteView, devices: set[str], plan: Plan) -> list[str]:
    found: list[str] = []
    number = view.route.route
    rows = Counter((row.program, row.kernel, row.device) for row in plan.assignments if row.route == number)
    for (program_name, kernel, device), count in rows.items():
        if count > 1:
            found.append(f"route {number}, {program_name}: kernel {kernel} is on {device} {count} times")
        if device not in devices:
            found.append(f"route {number}, {program_name}: kernel {kernel} is on unknown device {device}")
    expected = {(p.name, k.id) for p in view.programs for k in p.kernels}
    for program_name, kernel in sorted(expected - set(view.where)):
        found.append(f"route {number}, {program_name}: kernel {kernel} has no device")
    for program_name, kernel in sorted(set(view.where) - expected):
        found.append(f"route {number}, {program_name}: kernel {kernel} is not in the trace")
    for program in view.programs:
        for item in program.kernels:
            where = view.where.get((program.name, item.id), {})
            if len(where) > 1 and item.state_writer != "copy":
                found.append(
                    f"route {number}, {program.name}: kernel {item.id} is on {len(where)} devices and is no"
                    " copying state writer"
                )
    return found


def _home_defects(view: RouteView, trace: Trace, deps: Deps) -> list[str]:
    found: list[str] = []
    place = f"route {view.route.route}"
    computed: set[str] = set()
    for program in view.programs:
        bound = families_of(program, trace)
        for access in deps.accesses(program.id):
            for family in bound.get(access.buffer, ()):
                where = set(view.where[program.name, access.kernel])
                writer = program.kernels[access.kernel].state_writer
                if access.mode == "write" and writer != "copy":
                    computed.add(family)
                if not where <= view.homes[family]:
                    found.append(
                        f"{place}, {program.name}: kernel {access.kernel} is not on a home of {family}"
                    )
                elif access.mode == "write" and where != view.homes[family]:
                    found.append(
                        f"{place}, {program.name}: writer {access.kernel} does not run on every home of {family}"
                    )
    for family in sorted(computed):
        if len(view.homes[family]) != 1:
            found.append(
                f"{place}: {family} is computed, so it needs one home, not {len(view.homes[family])}"
            )
    return sorted(set(found))


def _feeds(view: RouteView, trace: Trace, deps: Deps) -> list[tuple[Program, int, int, set[str]]]:
    """(program, last writer, output buffer, devices of the next iteration that read it)."""
    found = []
    for index, program in enumerate(view.programs):
        for following, binding in feeding_outputs(view.programs, index):
            fed = trace.tensors[following.bindings("input")[str(binding.feeds)].tensor].buffer
            buffer = trace.tensors[binding.tensor].buffer
            writers = _writers(program, buffer, deps)
            wanted: set[str] = set()
            for access in deps.accesses(following.id):
                if access.buffer == fed and access.mode == "read":
                    wanted |= set(view.where[following.name, access.kernel])
            if writers:
                found.append((program, max(writers), buffer, wanted))
    return found


def _writers(program: Program, buffer: int, deps: Deps) -> set[int]:
    return {a.kernel for a in deps.accesses(program.id) if a.buffer == buffer and a.mode == "write"}


def _sharing_defects(view: RouteView, trace: Trace, deps: Deps) -> list[str]:
    """Kernels that fill one buffer inexactly, or make one output between them, run on the same device."""
    found: list[str] = []
    for program in view.programs:
        groups = [(group, "are tied by a collective") for group in program.ties()]
        groups += [
            (group, "fill one buffer, or are tied to those that do") for group in deps.chains(program.id)
        ]
        for binding in program.bindings("output").values():
            buffer = trace.tensors[binding.tensor].buffer
            if trace.buffers[buffer].kind != "state":
                groups.append((tuple(sorted(_writers(program, buffer, deps))), f"make output {binding.name}"))
        for group, what in groups:
            spots = {tuple(sorted(view.where[program.name, kernel])) for kernel in group}
            if len(spots) > 1 or any(len(spot) > 1 for spot in spots if len(group) > 1):
                found.append(
                    f"route {view.route.route}, {program.name}: kernels {list(group)} {what},"
                    " so they must share a device"
                )
    return found


def _transfer_defects(view: RouteView, trace: Trace, deps: Deps) -> list[str]:
    found: list[str] = []
    place = f"route {view.route.route}"
    by_key = {(row.program, row.producer, row.buffer, row.destination): row for row in view.sent}
    if len(by_key) != len(view.sent):
        found.append(f"{place}: a buffer is shipped twice to one device")
    needed: set[tuple[str, int, int, str]] = set()
    for program in view.programs:
        for edge in deps.edges(program.id):
            if edge.hazard != "RAW" or edge.source == edge.destination:
                continue
            missing = set(view.where[program.name, edge.destination]) - set(
                view.where[program.name, edge.source]
            )
            for device in sorted(missing):
                what = f"{place}, {program.name}: buffer {edge.buffer} from kernel {edge.source} to {device}"
                key = (program.name, edge.source, edge.buffer, device)
                needed.add(key)
                if trace.buffers[edge.buffer].kind == "state":
                    found.append(f"{what}: state does not cross devices within an iteration")
                elif key not in by_key:
                    found.append(f"{what}: is not shipped")
                elif not _covered(by_key[key].boxes, edge):
                    found.append(f"{what}: the boxes shipped don't cover what is read")
    for program, writer, buffer, devices in _feeds(view, trace, deps):
        for device in sorted(devices - set(view.where[program.name, writer])):
            key = (program.name, writer, buffer, device)
            needed.add(key)
            if key not in by_key:
                found.append(
                    f"{place}, {program.name}: output {buffer} is not shipped to {device}, which it feeds"
                )
            elif by_key[key].boxes is not None:
                found.append(f"{place}, {program.name}: output {buffer} feeds {device} only in part")
    last: dict[str, tuple[int, int]] = {}
    for row in view.sent:
        what = f"{place}, {row.program}: transfer of buffer {row.buffer} to {row.destination}"
        if (row.program, row.producer, row.buffer, row.destination) not in needed:
            found.append(f"{what}: nobody needs it")
        elif row.source not in view.where[row.program, row.producer]:
            found.append(f"{what}: {row.source} does not run its producer {row.producer}")
        whole = trace.buffers[row.buffer].bytes
        size = whole if row.boxes is None else union_bytes(row.boxes, whole)
        if row.bytes != size:
            found.append(f"{what}: bytes is {row.bytes}, should be {size}")
        order = (row.order, row.producer)
        before = last.get(row.program)
        if before is not None and not (before[0] < order[0] and before[1] <= order[1]):
            found.append(f"{what}: the order does not follow the producers")
        last[row.program] = order
    return found


def _covered(boxes: Any, edge: Edge) -> bool:
    if boxes is None:
        return True
    return edge.must and edge.boxes is not None and all(covers(boxes, box) for box in edge.boxes)


def _memory_defects(plan: Plan, real: Evaluation) -> list[str]:
    found: list[str] = []
    stated = {row["device"]: row for row in plan.facts["memory"]}
    domains: dict[str, list[str]] = defaultdict(list)
    capacity: dict[str, int] = {}
    for device in plan.devices:
        domains[device.memory_domain].append(device.name)
        capacity[device.memory_domain] = max(capacity.get(device.memory_domain, 0), device.capacity_bytes)
    for held in real.memory:
        row = stated.get(held.device)
        if row is None:
            found.append(f"memory of {held.device} is not stated")
            continue
        for name in ("weight_bytes", "state_bytes", "activation_bytes"):
            if row[name] != getattr(held, name):
                found.append(
                    f"memory of {held.device}: {name} is {row[name]}, should be {getattr(held, name)}"
                )
    for domain, members in domains.items():
        total = sum(held.total for held in real.memory if held.device in members)
        if total > capacity[domain]:
            found.append(f"memory of {domain}: {total} bytes do not fit into {capacity[domain]}")
    return found


def _compare(found: list[str], what: str, stated: float, real: float) -> None:
    if abs(stated - real) > TOLERANCE * max(abs(real), 1e-9):
        found.append(f"{what} is {stated:g}, should be {real:g}")
