"""Every strategy and every choice of what is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.peak_memory.training import Case
from lowbit_strategy import DiLoCo, Exact, LoCo, TopK, WeightCode, WeightDelta
from lowbit_strategy.local_steps.published import OUTER_RULES
from lowbit_strategy.methods.registry import PRESETS


def _of_presets() -> list[Case]:
    return [
        Case(name=f"{name}_{kind}", kind=kind, compressor=compressor)
        for kind in ("ddp", "fsdp")
        for name, compressor in PRESETS.items()
    ]


def _of_rules() -> list[Case]:
    return [
        Case(name=f"{name}_ddp", kind="ddp", compressor=rule.compressor(), options=(("outer", _short(rule)),))
        for name, rule in OUTER_RULES.items()
    ]


def _short(rule: Any) -> Any:
    """With rounds that end within the steps of a case."""
    changed = {"every": 2, "fragments": min(rule.fragments, 2), "delay": min(rule.delay, 1)}
    return replace(rule, **changed, **({"synchronous": 1} if rule.synchronous else {}))


def _loco(name: str, compressor: LoCo | None = None, **options: Any) -> Case:
    fields = {key: options.pop(key) for key in list(options) if key in Case.__dataclass_fields__}
    kind = fields.pop("kind", "fsdp")
    return Case(name=name, kind=kind, compressor=compressor or LoCo(), options=tuple(options.items()), **fields)


CASES: tuple[Case, ...] = (
    *(_loco(f"loco_fsdp, residual {each}", LoCo(residual=each)) for each in ("float32", "none")),
    *(_loco(f"loco_ddp, residual {each}", LoCo(residual=each), kind="ddp") for each in ("float32", "none")),
    _loco("loco_fsdp, weights exact", weights=Exact()),
    _loco("loco_fsdp, weights exact and kept", weights=Exact(keep="replica")),
    _loco("loco_fsdp, weights gathered again", weights=WeightCode(keep="nothing")),
    _loco("loco_fsdp, weights kept decoded", weights=WeightCode(keep="replica")),
    _loco("loco_fsdp, differences of weights", weights=WeightDelta()),
    _loco("loco_fsdp, bf16-mixed", precision="bf16-mixed"),
    _loco("loco_fsdp, bf16-mixed, weights gathered again", precision="bf16-mixed", weights=WeightCode(keep="nothing")),
    _loco("loco_fsdp, 2 micro-batches reduced", batches=2),
    _loco("loco_fsdp, 2 micro-batches kept", batches=2, accumulate="local"),
    _loco("loco_ddp, 2 micro-batches", kind="ddp", batches=2),
    *_of_rules(),
    _loco("loco_ddp, two levels", kind="ddp", world_size=4, per_node=2),
    _loco("loco_fsdp, two levels", world_size=4, per_node=2),
    _loco(
        "loco_fsdp, two levels, weights gathered again", world_size=4, per_node=2, weights=WeightCode(keep="nothing")
    ),
    _loco("loco_hsdp", kind="hsdp", world_size=4, per_node=2),
    _loco("diloco_hsdp", kind="hsdp", world_size=4, per_node=2, outer=DiLoCo(every=2)),
    *(
        Case(name=f"topk_{kind}, residual int8", kind=kind, compressor=TopK(residual="int8"))
        for kind in ("ddp", "fsdp")
    ),
    *_of_presets(),
)
