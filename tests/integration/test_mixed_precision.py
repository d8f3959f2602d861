"""FSDP2 in the trainer's precision: weights travel and compute in the half type; accumulation, kept or reduced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn import functional as F

from lowbit_strategy import Exact, LoCo, WeightCode
from lowbit_strategy.fabric import LowBitFSDPStrategy
from lowbit_strategy.model.sharded import sharded_groups
from testing.counting.traffic import count_exchanges
from testing.log import listen
from testing.processes.scenarios import Facts, all_but, scenarios
from testing.training.comparing import fingerprint, full_parameters
from testing.training.regression import WIDTH, Regression, dataset, fit, mlp


class Watched(Regression):
    """Notes the types that its modules compute with."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__(net)
        self.seen: set[str] = set()
        for child in self.net.modules():
            if isinstance(child, nn.Linear):
                child.register_forward_hook(lambda module, *_: self.seen.add(str(module.weight.dtype)))


def normed() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 8)
    )


def in_precision(folder: Path, precision: str) -> Facts:
    runs: dict[str, Any] = {}
    for name, weights in (("code", WeightCode()), ("exact", Exact(keep="replica"))):
        torch.manual_seed(0)
        model = Watched()
        options = {"weights": weights}
        made = fit("fsdp", model, options=options, precision=precision, max_steps=20)  # type: ignore[arg-type]
        sync = made.strategy.sync
        assert sync is not None
        assert sync.weights is not None
        runs[name] = {
            "losses": model.losses,
            "weights_nbytes": sync.weights.step_nbytes,
            "gradient_nbytes": sum(sync.state.sent_nbytes(spec) for spec in sync.specs),
            "gathered": {str(layout.dtype) for layout in sync.weights.layouts.values()},
            "computed": model.seen,
            "reduced": {str(each.param_group.mp_policy.reduce_dtype) for each in sharded_groups(model)},
            "kept": {str(param.dtype) for param in model.parameters()},
            "print": fingerprint(model),
        }
    torch.manual_seed(0)
    plain = Regression()
    fit("ddp", plain, precision=precision, max_steps=20)  # type: ignore[arg-type]
    return runs | {"ddp": plain.losses}


@scenarios(in_precision, precision=("bf16-mixed", "bf16-true", "32-true"), slow=all_but(precision="bf16-mixed"))
def test_weights_travel_and_compute_in_the_trainers_type(facts: list[Facts], request: Any) -> None:
    precision = request.node.callspec.id
    for rank in facts:
        computed = "torch.float32" if precision == "32-true" else "torch.bfloat16"
        for name in ("code", "exact"):
            run = rank[name]
            assert run["computed"] == run["gathered"] == {computed}
            assert run["reduced"] == {"torch.float32" if precision == "bf16-mixed" else "None"}
            assert run["kept"] == {"torch.bfloat16" if precision == "bf16-true" else "torch.float32"}
            assert run["print"] == facts[0][name]["print"]
            assert sum(run["losses"][-4:]) < 1.1 * sum(rank["ddp"][-4:])
        elements = sum(param.numel() for param in mlp().parameters())
        itemsize = 4 if precision == "32-true" else 2
        padding = 1.05  # of rows that do not divide evenly
        assert rank["exact"]["weights_nbytes"] <= padding * itemsize * elements / 2
        assert rank["code"]["weights_nbytes"] < 0.75 * rank["exact"]["weights_nbytes"] * (4 / itemsize) / 2


def with_norms(folder: Path) -> Facts:
    """Running statistics are float32, so a batch norm computes with float32 weights; a policy of one's own."""
    torch.manual_seed(0)
    model = Regression(normed())
    fit("fsdp", model, precision="bf16-mixed", max_steps=20)
    torch.manual_seed(0)
    own = Watched()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    fit("fsdp", own, options={"mp_policy": policy})
    groups = [each.param_group for each in sharded_groups(own)]
    return {
        "losses": model.losses,
        "values": {name: value.tolist() for name, value in full_parameters(model).items()},
        "own": own.seen,
        "policies": all(group.mp_policy == policy for group in groups),
    }


@scenarios(with_norms)
def test_batch_norms_keep_their_type_and_a_policy_of_ones_own_is_taken(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["losses"][-1] < rank["losses"][0]
        assert rank["values"] == facts[0]["values"]
        assert rank["own"] == {"torch.bfloat16"}
        assert rank["policies"]


def with_fabric(folder: Path) -> Facts:
    facts: Facts = {}
    for accumulate in ("local", "reduce"):
        torch.manual_seed(0)
        strategy = LowBitFSDPStrategy(LoCo(block_size=32), min_shard_numel=2000, accumulate=accumulate)
        made = L.Fabric(accelerator="cpu", devices=2, strategy=strategy, precision="bf16-mixed")
        made.launch()
        net = mlp()
        model, _ = made.setup(net, torch.optim.Adam(net.parameters(), lr=1e-2))
        x, y = (tensor[4 * made.global_rank :][:4] for tensor in dataset().tensors)
        with count_exchanges() as exchanges:
            for step in range(4):
                with made.no_backward_sync(model, enabled=step % 2 == 0):
                    made.backward(F.mse_loss(model(x), y))
        facts[accumulate] = len(exchanges)
        (session,) = strategy.sessions
        assert session.sync.weights is not None
        facts[f"{accumulate} gathers"] = {each.num_sent for each in session.sync.weights.modules.values()}
        facts["types"] = {str(each.param_group.mp_policy.param_dtype) for each in sharded_groups(net)}
    return facts


@scenarios(with_fabric)
def test_fabric(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["types"] == {"torch.bfloat16"}
        assert rank["reduce"] == 2 * rank["local"] > 0
        assert rank["reduce gathers"] == rank["local gathers"] == {2}


class Accumulating(Regression):
    """Notes how many bytes of unsharded gradients wait for the next micro-batch."""

    def on_train_batch_end(self, *_: Any) -> None:
        groups = [
            child._get_fsdp_state()._fsdp_param_group for child in self.modules() if isinstance(child, FSDPModule)
        ]
        params = [param.unsharded_param for group in groups if group is not None for param in group.fsdp_params]
        now = sum(param.grad.nbytes for param in params if param.grad is not None)
        self.waiting = max(getattr(self, "waiting", 0), now)


def accumulation(folder: Path) -> Facts:
    facts: Facts = {}
    for accumulate in ("local", "reduce"):
        torch.manual_seed(0)
        model = Accumulating()
        with count_exchanges() as exchanges, listen() as lines:
            options = {"accumulate": accumulate}
            made = fit("fsdp", model, options=options, max_steps=24, max_epochs=-1, accumulate_grad_batches=2)
        sync = made.strategy.sync
        assert sync is not None
        assert sync.weights is not None
        facts[accumulate] = {
            "losses": model.losses,
            "waiting": model.waiting,
            "exchanges": len(exchanges),
            "gathers": {module.num_sent for module in sync.weights.modules.values()},
            "steps": sync.step_index,
            "print": fingerprint(model),
            "log": [line for line in lines if "micro-batches" in line],
        }
    return facts


@scenarios(accumulation)
def test_micro_batches_are_kept_or_reduced_with_the_same_loss(facts: list[Facts]) -> None:
    elements = sum(param.numel() for param in mlp().parameters())
    for rank in facts:
        local, reduced = rank["local"], rank["reduce"]
        assert local["steps"] == reduced["steps"] == 24
        assert reduced["exchanges"] == 2 * local["exchanges"]
        assert reduced["gathers"] == local["gathers"] == {24}
        assert reduced["waiting"] == 0
        assert local["waiting"] == 4 * elements
        assert sum(reduced["losses"][-8:]) < 1.1 * sum(local["losses"][-8:])
        assert reduced["print"] == facts[0]["reduce"]["print"]
    (line,) = facts[0]["local"]["log"]
    assert 'accumulate="reduce"' in line
    (line,) = facts[0]["reduce"]["log"]
    assert "2 times per step" in line
