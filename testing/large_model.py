"""The plan of a model with seventy billion parameters."""

from __future__ import annotations

from typing import Any

import torch

from lowbit_strategy import LoCo
from lowbit_strategy.attach.prepare import Wrapper
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.methods._base.compressor import assign_all
from lowbit_strategy.methods.weight_codings import WeightCoding
from lowbit_strategy.model.module_layout import ModuleLayout
from lowbit_strategy.plan.plan import StepPlan, make_plan
from lowbit_strategy.plan.reduced import ParamGroup
from lowbit_strategy.ranks.topology import Topology

_LAYER = {
    "self_attn.q_proj.weight": (8192, 8192),
    "self_attn.k_proj.weight": (1024, 8192),
    "self_attn.v_proj.weight": (1024, 8192),
    "self_attn.o_proj.weight": (8192, 8192),
    "mlp.gate_proj.weight": (28672, 8192),
    "mlp.up_proj.weight": (28672, 8192),
    "mlp.down_proj.weight": (8192, 28672),
    "input_layernorm.weight": (8192,),
    "post_attention_layernorm.weight": (8192,),
}


def _llama() -> list[TensorSpec]:
    specs = [TensorSpec("model.embed_tokens.weight", (128256, 8192), role="embedding")]
    for layer in range(80):
        specs += [TensorSpec(f"model.layers.{layer}.{name}", shape) for name, shape in _LAYER.items()]
    return [*specs, TensorSpec("model.norm.weight", (8192,)), TensorSpec("lm_head.weight", (128256, 8192), role="head")]


def _modules(specs: list[TensorSpec]) -> dict[str, ModuleLayout]:
    """One per layer, as `fully_shard` is usually called."""
    layers: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        layer = ".".join(spec.name.split(".")[:3]) if ".layers." in spec.name else "root"
        layers.setdefault(layer, []).append(spec)
    return {
        name: ModuleLayout(specs=tuple(members), dtype=torch.bfloat16, num_gathers=2)
        for name, members in layers.items()
    }


def plan_of_llama(
    wrapper: Wrapper, size: int | None, coding: WeightCoding | None = None, outer: Any = None
) -> StepPlan:
    """A thousand ranks, in nodes of `size` if their ranks have two levels."""
    specs, topology = _llama(), Topology(1000, (8,) * 125, node_size=size)
    parts = topology.own_parts(specs, sharded=wrapper == "fsdp")
    reduced = [ParamGroup(tuple(s.name for s in m.specs), 2, name) for name, m in _modules(specs).items()]
    return make_plan(
        parts,
        assign_all(LoCo(), parts),
        topology,
        wrapper,
        reduced=None if wrapper == "ddp" else reduced,
        coding=coding,
        modules=None if coding is None else _modules(specs),
        round_plan=None if outer is None else outer.planned(),
    )
