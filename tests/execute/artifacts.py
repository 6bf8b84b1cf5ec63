"""The toy trace and plans for it as artifacts in a folder."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from tessera_core.deps.stage import DepsStage
from tessera_core.plan.ir import Plan, save_plan
from tessera_core.program.ir import Trace
from tessera_core.program.store import load_trace, save_trace
from tessera_formats.deps import read_deps


def write_artifacts(folder: Path, trace: Trace, plan: Plan, **facts: Any) -> tuple[Path, Path, Path]:
    """Write trace, deps and a plan that belongs to them; gives plan, trace, deps."""
    save_trace(folder / "x.trace", trace)
    digest = load_trace(folder / "x.trace").digest
    DepsStage().run(folder / "x.trace", folder / "x.deps")
    deps_digest = read_deps(folder / "x.deps").digest
    bound = replace(plan, facts={**plan.facts, "program_digest": digest, "deps_digest": deps_digest, **facts})
    save_plan(folder / "x.plan.toml", bound)
    return folder / "x.plan.toml", folder / "x.trace", folder / "x.deps"
