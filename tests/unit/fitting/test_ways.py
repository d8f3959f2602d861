"""What compression keeps fits: choices by arithmetic on the shapes of large models, without a process or a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowbit_strategy import EFSignSGD, Exact, LoCo, WeightCode, WeightDelta
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.fitting.fit import allowed_nbytes
from lowbit_strategy.fitting.memory import memory_of
from lowbit_strategy.fitting.ways import Setup, choose, memory_option, memory_options
from lowbit_strategy.methods._base.compressor import Compressor, assign_all
from lowbit_strategy.methods.weight_codings import WeightCoding
from lowbit_strategy.model.module_layout import ModuleLayout
from lowbit_strategy.plan.plan import make_plan
from lowbit_strategy.plan.reduced import ParamGroup
from lowbit_strategy.ranks.topology import Topology

GPU = 80 * 10**9


def llama(width: int, hidden: int, layers: int, kv: int, vocabulary: int) -> list[TensorSpec]:
    shapes = {
        "q": (width, width),
        "k": (kv, width),
        "v": (kv, width),
        "o": (width, width),
        "gate": (hidden, width),
        "up": (hidden, width),
        "down": (width, hidden),
        "norm": (width,),
    }
    specs = [TensorSpec("embed.weight", (vocabulary, width), role="embedding")]
    specs += [TensorSpec(f"layers.{i}.{name}.weight", shape) for i in range(layers) for name, shape in shapes.items()]
    return [*specs, TensorSpec("head.weight", (vocabulary, width), role="head")]


LLAMA_70B = llama(8192, 28672, 80, 1024, 128256)
LLAMA_13B = llama(5120, 13824, 40, 5120, 32000)


def setup(specs: list[TensorSpec], nodes: int, per_node: int) -> Setup:
    """FSDP2 over all ranks; two levels where there are several nodes."""
    world_size = nodes * per_node
    modules: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        modules.setdefault(".".join(spec.name.split(".")[:2]) if "layers" in spec.name else "", []).append(spec)
    layouts = {
        name: ModuleLayout(specs=tuple(own), dtype=torch.bfloat16, num_gathers=2) for name, own in modules.items()
    }
    topology = Topology(world_size, (per_node,) * nodes, node_size=per_node if nodes > 1 else None)
    return Setup(specs=specs, topology=topology, wrapper="fsdp", modules=layouts)


LLAMA_8B = llama(4096, 14336, 32, 1024, 128256)
QWEN_14B = llama(5120, 17408, 40, 1024, 151936)


@pytest.mark.parametrize(
    ("specs", "nodes", "weights"),
    [(LLAMA_8B, 1, "codes"), (LLAMA_13B, 1, "nothing"), (QWEN_14B, 1, "nothing"), (LLAMA_70B, 8, "nothing")],
)
def test_the_residual_of_usual_models_on_80_gb_is_kept(specs: list[TensorSpec], nodes: int, weights: str) -> None:
    own_numel = sum(spec.numel for spec in specs) // (8 * nodes)
    free = GPU - 4 * own_numel  # float32 parameters are there
    room = allowed_nbytes(GPU, free, own_numel)
    best = choose(list(memory_options(LoCo(), WeightCode(), setup(specs, nodes, 8), may_recode=True)), room, free)
    assert best.compressor == LoCo()
    assert best.weights is not None
    assert best.weights.keep == weights
    assert best.memory.total <= GPU / 4
    assert best.memory.total + 16 * own_numel < 0.65 * GPU  # the rest is for activations


@pytest.mark.parametrize(
    ("free", "own_numel", "allowed"),
    [(80, 0, 20), (60, 1, 20), (60, 2, 18), (40, 2, 10), (10, 0, 10), (30, 4, 10)],  # GB, billions, GB
)
def test_what_is_free_decides_between_an_eighth_and_a_quarter(free: int, own_numel: int, allowed: int) -> None:
    assert allowed_nbytes(GPU, free * 10**9, own_numel * 10**9) == allowed * 10**9


def chosen(
    specs: list[TensorSpec],
    nodes: int,
    *,
    room: float = GPU / 8,
    limit: float = GPU,
    compressor: Compressor | None = None,
    weights: WeightCoding | None = None,
) -> str:
    where = setup(specs, nodes, 8)
    asked = (compressor or LoCo(), weights or WeightCode())
    found = list(memory_options(*asked, where, may_recode=weights is None))
    best = choose(found, int(room), int(limit))
    assert best.memory.total <= room or best == min(found, key=lambda each: each.memory.total)
    return best.differs


def total(specs: list[TensorSpec], nodes: int, compressor: Compressor, weights: WeightCoding) -> float:
    return memory_option(compressor, weights, setup(specs, nodes, 8)).memory.total / 1e9


def test_llama_70b_on_8_nodes_of_8_keeps_less_than_12_gb_without_the_user() -> None:
    assert sum(spec.numel for spec in LLAMA_70B) / 1e9 == pytest.approx(70.5, abs=0.2)
    assert total(LLAMA_70B, 8, LoCo(), WeightCode()) > 70
    differs = chosen(LLAMA_70B, 8)
    assert differs == "weights are gathered again in backward instead of kept as codes; no residual is kept"
    memory = memory_option(LoCo(residual="none"), WeightCode(keep="nothing"), setup(LLAMA_70B, 8, 8)).memory
    assert memory.total / 1e9 < 12
    assert memory.messages / 1e9 < 5  # of the root, which has embedding and head: they go in pieces inside the node


def test_llama_13b_on_one_node_keeps_less_than_10_gb_without_the_user() -> None:
    assert sum(spec.numel for spec in LLAMA_13B) / 1e9 == pytest.approx(13.0, abs=0.1)
    assert total(LLAMA_13B, 1, LoCo(), WeightCode()) > 26
    assert chosen(LLAMA_13B, 1) == (
        "weights are gathered again in backward instead of kept as codes; no residual is kept"
    )
    assert total(LLAMA_13B, 1, LoCo(residual="none"), WeightCode(keep="nothing")) < 3


def test_what_fits_is_left_as_it_was_asked_for() -> None:
    small = llama(2048, 5632, 22, 256, 32000)  # 1.1 billion
    assert chosen(small, 1) == ""
    assert chosen(LLAMA_13B, 1, room=45e9) == ""


def test_copies_of_residuals_are_given_up_first() -> None:
    assert chosen(LLAMA_13B, 1, room=30e9) == "residuals are not copied"
    assert "no residual is kept" not in chosen(LLAMA_13B, 1, room=15e9)


def test_what_the_user_has_chosen_is_not_changed() -> None:
    assert "gathered" not in chosen(LLAMA_13B, 1, weights=WeightCode())
    assert "gathered" not in chosen(LLAMA_13B, 1, weights=WeightDelta())
    assert chosen(LLAMA_13B, 1, weights=Exact(), compressor=LoCo(residual="float32")) == "residuals are not copied"
    assert chosen(LLAMA_13B, 1, weights=Exact(), compressor=EFSignSGD()) == "residuals are not copied"


def test_residuals_are_given_up_only_where_it_was_measured() -> None:
    assert "no residual" in chosen(LLAMA_13B, 1, room=1e9)
    others = LoCo(bits=2, codebook="fitted"), LoCo(return_codebook="fitted"), LoCo(bits=3), LoCo(residual="float32")
    for other in others:
        assert "no residual" not in chosen(LLAMA_13B, 1, room=1e9, compressor=other)
    assert "no residual" not in chosen(LLAMA_70B, 2, limit=1e12)  # two peers


def test_what_cannot_fit_is_an_error_with_the_arithmetic() -> None:
    with pytest.raises(
        ValueError, match=r"would keep 4\d\.\d GB \(13\.\d GB for residuals, 13.* but only 1 GB are allowed"
    ) as error:
        chosen(LLAMA_13B, 1, room=1e9, limit=1e9)
    assert "at least 1" in str(error.value)
    assert "memory=" in str(error.value)


def test_amounts_of_small_models_are_told_in_units_that_show_them() -> None:
    small = [TensorSpec("weight", (256, 256))]
    found = list(memory_options(LoCo(), None, replace(setup(small, 1, 8), modules={}, wrapper="ddp"), may_recode=True))
    with pytest.raises(
        ValueError, match=r"would keep [\d.]+ KB \(.*, at least [\d.]+ KB .* but only 1 KB are allowed"
    ) as error:
        choose(found, 1000, 1000)
    enough = int(float(str(error.value).rpartition("memory=")[2]) * 1e9)
    assert choose(found, enough, enough).memory.total <= enough


def test_every_choice_says_what_it_costs() -> None:
    found = list(memory_options(LoCo(), WeightCode(), setup(LLAMA_13B, 1, 8), may_recode=True))
    assert [bool(each.costs) for each in found] == [bool(each.differs) for each in found] == [False, True, True, True]
    assert "they are lost" in found[1].costs
    assert "weights travel twice" in found[2].costs
    assert "weights travel twice" in found[3].costs
    assert "0.3 %" in found[3].costs


def test_the_plan_tells_in_how_many_pieces_a_large_module_goes() -> None:
    """Llama-70B's embedding and head, 8 nodes of 8: 8.4 GB of float32 inside the node, 256 MiB at a time."""
    where = setup(LLAMA_70B, 8, 8)
    parts = where.topology.own_parts(LLAMA_70B, sharded=True)
    root = ParamGroup(tuple(spec.name for spec in where.modules[""].specs), name="root")
    plan = make_plan(
        parts,
        assign_all(LoCo(), parts),
        where.topology,
        "fsdp",
        reduced=[root],
        coding=WeightCode(keep="nothing"),
        modules={"": where.modules[""]},
    )
    (inside, between, _), (far, near) = plan.gradients[0].messages, plan.weights[0].messages
    assert inside.in_series == pytest.approx(8.4e9 / 2**28, abs=2)
    assert far.in_series == near.in_series == pytest.approx(2.14e9 / 2**28, abs=2)
    assert between.in_series == 1
    assert memory_of(plan).messages < 5e9
