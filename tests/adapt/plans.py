"""Plans with round times on one device, for schedules that can be worked out by hand."""

from tessera_core.adapt.model import PlanModel, ProgramCost, plan_model
from tessera_core.plan.ir import Plan, load_plan
from tests.cli.artifacts import DECODE, PREFILL, plan_document, synthetic_trace


def plan(tmp_path, name, *, prefill_us=10_000.0, decode_us=10_000.0, slots=1, device="cpu0") -> Plan:
    """One route of batch 2 with all kernels on one device."""
    from tessera_formats.plan import write_plan

    times = {PREFILL: prefill_us, DECODE: decode_us}
    path = tmp_path / f"{name}.plan.toml"
    write_plan(path, plan_document("sha256:0", "sha256:0", times=times, slots=slots, placed=device))
    return load_plan(path)


def model(tmp_path, name="plan", corrections=None, **options) -> PlanModel:
    return plan_model(name, plan(tmp_path, name, **options), synthetic_trace(), corrections or {})


def predicted(name: str, interval_us: float, latency_us: float, base: PlanModel) -> PlanModel:
    """The same routes with another prediction."""
    from dataclasses import replace

    (route,) = base.routes
    costs = tuple(
        ProgramCost(name=p.name, batch=p.batch, interval_us=interval_us, latency_us=latency_us)
        for p in route.programs
    )
    return PlanModel(name, (replace(route, programs=costs),))
