"""The demonstration as the command lines that it consists of, and how they are run in one process.

Nothing here knows how a stage works: each step is a line that a person could type, in the folder of the
demonstration, and ``commands.sh`` there holds just these lines.
"""

from __future__ import annotations

import contextlib
import io
import shlex
from collections.abc import Callable
from pathlib import Path

from tessera_formats.files import replace_file

OUTPUT_TOKENS = "16"
STRATEGIES = ("placement", "data-parallel", "single")
CPU_PLANS = tuple(Path(f"cpu-{strategy}.plan.toml") for strategy in STRATEGIES)
CPU_RUNS = tuple(Path(f"cpu-{strategy}.run") for strategy in STRATEGIES)
TRACE, DEPS, ADAPT = Path("x.trace"), Path("x.deps"), Path("x.adapt")
GPU_PLAN, LATENCY_PLAN, WORKLOAD = (
    Path("gpu.plan.toml"),
    Path("cpu-latency.plan.toml"),
    Path("load.toml"),
)

CLUSTERS = {
    "a100-l40s.toml": """\
# An A100 and an L40S, connected by a 200 Gbit/s network.
[[device]]
name = "a100"
type = "a100-80gb"

[[device]]
name = "l40s"
type = "l40s"

[[link]]
between = ["a100", "l40s"]
gbit_per_s = 200
latency_us = 5
""",
    "two-cpus.toml": """\
# Two CPU workers of one thread each; the link between them is measured.
[[device]]
name = "cpu0"
type = "cpu-1thread"
memory_gb = 2
memory_domain = "host"

[[device]]
name = "cpu1"
type = "cpu-1thread"
memory_gb = 2
memory_domain = "host"
""",
}
"""Cluster files that the demonstration writes, by name."""

_PLAN = f"partition x.trace x.deps {{profile}} --cluster {{cluster}}.toml --output-tokens {OUTPUT_TOKENS}"
_CPU = _PLAN.format(profile="cpu.profile.arrow", cluster="two-cpus")
PLANNING = tuple(
    line.split()
    for line in (
        "trace demo --program prefill:batch=1,context=16 --program decode:batch=4,context=64"
        " --program decode:batch=1,context=64 --ptx-target sm_90 -o x.trace",
        "ptx-deps x.trace -o x.deps",
        "profile x.trace --device cpu-1thread=cpu:0 --beside cpu:1 --seconds 12 -o cpu.profile.arrow",
        "profile x.trace --device a100-80gb --device l40s -o gpu.profile.arrow",
        _PLAN.format(profile="gpu.profile.arrow", cluster="a100-l40s")
        + f" --policy throughput -o {GPU_PLAN}",
        *(
            f"{_CPU} --policy throughput --strategy {strategy} -o {plan}"
            for strategy, plan in zip(STRATEGIES, CPU_PLANS, strict=True)
        ),
        f"{_CPU} --policy latency -o {LATENCY_PLAN}",
    )
)
SERVING = tuple(
    line.split()
    for line in (
        *(
            f"run {plan} --trace x.trace --deps x.deps --batches 24 --verify -o {run}"
            for plan, run in zip(CPU_PLANS, CPU_RUNS, strict=True)
        ),
        f"adapt {CPU_PLANS[1]} {LATENCY_PLAN} --trace x.trace --deps x.deps --workload {WORKLOAD} -o x.adapt",
    )
)


def perform(
    invoke: Callable[[list[str]], int],
    workload: Callable[[Path, int], str],
    progress: Callable[[str], None],
) -> None:
    """Run every step in the working folder; what they print goes to ``commands.log``, line by line in order."""
    lines = "\n".join(f"tessera {shlex.join(words)}" for words in (*PLANNING, *SERVING))
    script = (
        f'#!/bin/sh\n# What `tessera demo` ran, in this folder.\nset -eu\ncd "$(dirname "$0")"\n{lines}\n'
    )
    replace_file("commands.sh", script.encode())
    for name, text in CLUSTERS.items():
        replace_file(name, text.encode())
    log = io.StringIO()
    for words in (*PLANNING, *SERVING):
        if words is SERVING[0]:
            replace_file(WORKLOAD, workload(LATENCY_PLAN, int(OUTPUT_TOKENS)).encode())
        progress(f"tessera {shlex.join(words)}")
        log.write(f"$ tessera {shlex.join(words)}\n")
        with contextlib.redirect_stdout(log):
            code = invoke(words)
        assert code == 0, f"tessera {shlex.join(words)} ended with {code}"
        log.write("\n")
        replace_file("commands.log", log.getvalue().encode())
