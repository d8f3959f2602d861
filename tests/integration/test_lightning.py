"""Training through Lightning's Trainer: what users switch on and off, under DDP and FSDP2, on two real processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.nn import functional as F

from lowbit_strategy import LoCo, TopK
from lowbit_strategy.plan.running import plan_of
from testing.counting.traffic import count_exchanges
from testing.log import listen
from testing.processes.scenarios import Facts, all_but, raised, scenarios
from testing.processes.scripts import run_script
from testing.training.comparing import fingerprint, full_parameters
from testing.training.regression import KINDS, Kind, Regression, fit, loader, strategy, trainer

SCRIPTS = Path(__file__).parent / "scripts"


def by_name(folder: Path, kind: Kind) -> Facts:
    model = Regression()
    with listen() as logged:
        made = trainer(f"loco_{kind}", max_steps=20)
        made.fit(model, loader())
    sync = made.strategy.sync
    return {
        "losses": model.losses,
        "print": fingerprint(model),
        "sent": sync.ranks.peers.sent_nbytes,
        "accounted": 20 * plan_of(sync).sent_nbytes,
        "steps": sync.step_index,
        "logged": logged,
    }


@scenarios(by_name, kind=KINDS)
def test_by_name(facts: list[Facts]) -> None:
    assert facts[0]["print"] == facts[1]["print"]
    for rank in facts:
        assert rank["losses"][-1] < 0.8 * rank["losses"][0]
        assert rank["steps"] == 20
        headers_and_padding = 20 * 2 * (16 + 6 * 15)
        assert rank["accounted"] < rank["sent"] <= rank["accounted"] + headers_and_padding


@scenarios(by_name, kind=KINDS)
def test_report_at_the_start(facts: list[Facts]) -> None:
    logged = facts[0]["logged"]
    assert facts[1]["logged"] == []
    assert "over 2 ranks, kernels: " in logged[0]
    assert "compressed     2 tensors         5,120 elements" in logged[1]
    assert logged[1].endswith("loco 4-bit E2M1, blocks of 128 (loco)")
    reasons = "\n".join(logged[2:4])
    assert "exempt         1 tensors           512 elements" in reasons
    assert "(fewer than 1024 elements)" in reasons
    assert "exempt         3 tensors           136 elements" in reasons
    assert "(1-D or scalar)" in reasons
    assert any("fp32" in line and "bf16" in line for line in logged[4:])
    assert logged[-1].strip().startswith("memory per rank")


def dense(folder: Path, kind: Kind) -> Facts:
    runs = {}
    for name in ("ddp", f"dense_{kind}"):
        torch.manual_seed(0)
        model = Regression()
        trainer(name).fit(model, loader())
        weights = {parameter: value.tolist() for parameter, value in full_parameters(model).items()}
        runs[name] = {"losses": model.losses, "weights": weights}
    return {"stock": runs["ddp"], "dense": runs[f"dense_{kind}"]}


@scenarios(dense, kind=KINDS)
def test_dense_is_stock_ddp_to_the_bit(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["stock"] == rank["dense"]


def by_class(folder: Path, kind: Kind) -> Facts:
    compressor = LoCo(bits=8, beta=0.5, block_size=32, exempt=("net.4.*", "@vector"))
    model = Regression()
    made = fit(kind, model, options={"compressor": compressor, "seed": 5}, max_steps=3)
    assignments = made.strategy.sync.state.assignments
    return {
        "compressor": made.strategy.sync.compressor == compressor,
        "seed": made.strategy.sync.seed,
        "kinds": {name: assignment.kind for name, assignment in assignments.items()},
        "print": fingerprint(model),
    }


@scenarios(by_class, kind=KINDS, slow=all_but(kind="ddp"))
def test_by_class(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]
    assert facts[0]["compressor"]
    assert facts[0]["seed"] == 5
    assert facts[0]["kinds"]["net.4.weight"] == facts[0]["kinds"]["net.2.bias"] == "exempt"
    assert facts[0]["kinds"]["net.0.weight"] == facts[0]["kinds"]["net.2.weight"] == "compressed"


def accumulation(folder: Path, kind: Kind) -> Facts:
    calls = {}
    for accumulate in (1, 4):
        model = Regression()
        with count_exchanges() as sizes:
            made = fit(kind, model, max_steps=3, accumulate_grad_batches=accumulate)
        calls[accumulate] = len(sizes)
    return {"calls": calls, "print": fingerprint(model), "steps": made.strategy.sync.step_index}


@scenarios(accumulation, kind=KINDS, slow=all_but(kind="ddp"))
def test_accumulation_compresses_once_a_step(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]
    assert facts[0]["calls"][1] == facts[0]["calls"][4] > 3
    assert facts[0]["steps"] == 3


def static_graph(folder: Path) -> Facts:
    model = Regression()
    made = fit("ddp", model, options={"static_graph": True}, max_steps=6)
    return {"print": fingerprint(model), "steps": made.strategy.sync.step_index, "losses": model.losses}


@scenarios(static_graph)
def test_static_graph(facts: list[Facts]) -> None:
    assert facts[0]["print"] == facts[1]["print"]
    assert facts[0]["steps"] == 6


def optimizers(folder: Path, kind: Kind, name: str) -> Facts:
    model = Regression(optimizer=name)
    fit(kind, model, max_steps=24)
    return {"losses": model.losses, "print": fingerprint(model)}


@scenarios(optimizers, kind=KINDS, name=("adam", "sgd"))
def test_optimizers(facts: list[Facts]) -> None:
    assert facts[0]["print"] == facts[1]["print"]
    for rank in facts:
        assert sum(rank["losses"][-5:]) < 0.9 * sum(rank["losses"][:5])


def precision(folder: Path, kind: Kind, name: str) -> Facts:
    model = Regression(optimizer="sgd")  # Adam's epsilon is zero in float16
    with count_exchanges() as sizes:
        fit(kind, model, max_steps=24, precision=name)
    return {
        "losses": model.losses,
        "print": fingerprint(model),
        "dtypes": {str(param.dtype) for param in model.parameters()},
        "calls": len(sizes),
    }


@scenarios(precision, kind=KINDS, name=("bf16-mixed", "bf16-true", "16-true"))
def test_precision(facts: list[Facts]) -> None:
    assert facts[0]["print"] == facts[1]["print"]
    assert facts[0]["dtypes"] <= {"torch.float32", "torch.bfloat16", "torch.float16"}
    for rank in facts:
        assert rank["calls"] >= 24
        assert sum(rank["losses"][-5:]) < 0.9 * sum(rank["losses"][:5])


class Overflowing(Regression):
    """In one batch the loss of the last rank is infinite."""

    bad_batch = 3

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        last = self.global_rank == self.trainer.world_size - 1
        return loss * float("inf") if last and batch_idx == self.bad_batch else loss


class _Around(L.Callback):
    """Parameters and residuals before and after every step."""

    def __init__(self) -> None:
        self.unchanged: list[dict[str, bool]] = []

    def _state(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, list[Tensor]]:
        return {
            "parameters": [param.detach().clone() for param in module.parameters()],
            "residuals": [tensor.clone() for tensor in trainer.strategy.sync.state.all_tensors()],
        }

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.before = self._state(trainer, module)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        same = {
            name: all(bool((a == b).all()) for a, b in zip(self.before[name], after, strict=True))
            for name, after in self._state(trainer, module).items()
        }
        self.unchanged.append(same)


def mixed_16(folder: Path, kind: Kind) -> Facts:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    model, around = Overflowing(), _Around()
    made = fit(kind, model, max_steps=7, plugins=[MixedPrecision("16-mixed", "cpu", scaler)], callbacks=[around])
    sync = made.strategy.sync
    return {
        "print": fingerprint(model),
        "finite": all(bool(p.isfinite().all()) for p in model.parameters()),
        "unchanged": around.unchanged,
        "scale": sync.loss_scale,
        "scaler's": scaler.get_scale(),
        "skipped": sync.num_skipped,
        "steps": sync.step_index,
    }


@scenarios(mixed_16, kind=KINDS)
def test_a_step_that_overflows_on_one_rank_is_skipped_on_all(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]
    assert facts[0]["finite"]
    assert facts[0]["skipped"] == 1
    assert facts[0]["steps"] == 6
    assert facts[0]["unchanged"] == [dict.fromkeys(("parameters", "residuals"), batch == 3) for batch in range(7)]
    # 1024, doubled after two steps, halved by the overflow, doubled after two more; the last update is not used yet
    assert facts[0]["scale"] == facts[0]["scaler's"] == 2048.0


def clipping(folder: Path, kind: Kind, algorithm: str) -> Facts:
    model = Regression(optimizer="plain", lr=1.0)
    before = {name: value.clone() for name, value in model.named_parameters()}
    fit(kind, model, max_steps=1, gradient_clip_val=0.01, gradient_clip_algorithm=algorithm)
    change = torch.cat([(full - before[name]).flatten() for name, full in full_parameters(model).items()])
    return {"norm": change.norm().item(), "largest": change.abs().max().item(), "print": fingerprint(model)}


@scenarios(clipping, kind=KINDS, algorithm=("norm", "value"))
def test_clipping(facts: list[Facts], request: pytest.FixtureRequest) -> None:
    assert facts[0] == facts[1]
    clipped = "norm" if "norm" in request.node.name else "largest"
    assert facts[0][clipped] == pytest.approx(0.01, rel=1e-4)


def loops(folder: Path, kind: Kind) -> Facts:
    model = Regression()
    made = trainer(strategy(kind), max_steps=4)
    seen: Facts = {"before": made.validate(model, loader())[0]["val_loss"]}
    made.fit(model, loader(), loader())
    first = made.strategy.sync
    seen["first"] = first.step_index
    seen["residual"] = [tensor.clone() for tensor in first.state.all_tensors()]
    seen["after"] = made.validate(model, loader())[0]["val_loss"]
    seen["test"] = made.test(model, loader())[0]["test_loss"]
    seen["predicted"] = torch.cat(made.predict(model, loader())).shape
    made.fit_loop.epoch_loop.max_steps = 4
    made.fit(model, loader(), loader())  # nothing left to do: what was kept is carried over
    second = made.strategy.sync
    seen["new"] = second is not first
    seen["carried"] = all(
        bool((a == b).all()) for a, b in zip(seen.pop("residual"), second.state.all_tensors(), strict=True)
    )
    made.fit_loop.epoch_loop.max_steps = 8
    made.fit(model, loader(), loader())
    seen["second"] = made.strategy.sync.step_index
    other = Regression()
    made.fit_loop.epoch_loop.max_steps = 10
    made.fit(other, loader())
    seen["other"] = made.strategy.sync.step_index
    return seen | {"print": fingerprint(model)}


@scenarios(loops, kind=KINDS, slow=all_but(kind="fsdp"))
def test_second_fit_and_other_loops(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]
    assert facts[0]["test"] == facts[0]["after"] < facts[0]["before"]
    assert facts[0]["predicted"] == (48, 8)
    assert facts[0]["new"]
    assert facts[0]["carried"]
    assert (facts[0]["first"], facts[0]["second"]) == (4, 8)
    assert facts[0]["other"] == 2  # another model does not inherit the first one's residuals


def accumulated_in_half(folder: Path) -> Facts:
    """How often a loss scaler is asked for its scale, which on CUDA waits for the device."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    asked: list[float] = []
    original = scaler.get_scale

    def get_scale() -> float:
        asked.append(original())
        return asked[-1]

    scaler.get_scale = get_scale  # type: ignore[method-assign]
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    model = Regression(optimizer="sgd")
    made = fit("ddp", model, max_steps=3, plugins=[plugin], accumulate_grad_batches=4)
    return {"asked": len(asked), "scale": made.strategy.sync.loss_scale, "print": fingerprint(model)}


@scenarios(accumulated_in_half)
def test_the_loss_scale_is_read_once_a_step(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]
    assert facts[0]["asked"] == 1 + 3  # before the first backward, then after every update
    assert facts[0]["scale"] == 2.0**11


class Direct(Regression):
    """Its steps do not call the LightningModule itself, so that FSDP2 leaves it gathered after a validation."""

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x), y)


def tuned(folder: Path, kind: Kind) -> Facts:
    """A learning rate finder trains, loads what it has saved before, removes the file; then the real fit."""
    model = Regression()
    made = trainer(strategy(kind), max_steps=4, default_root_dir=folder)
    found = Tuner(made).lr_find(model, train_dataloaders=loader(), num_training=6, update_attr=True)
    after_search = made.strategy.sync.step_index
    made.fit(model, loader())
    finder = LearningRateFinder(num_training_steps=6)
    once = trainer(strategy(kind), max_steps=4, default_root_dir=folder, callbacks=[finder], val_check_interval=6)
    again = Direct()
    once.fit(again, loader(), loader())  # the search ends with a validation
    return {
        "suggested": found is not None,
        "after search": after_search,
        "tuner": {"steps": made.strategy.sync.step_index, "print": fingerprint(model)},
        "callback": {"steps": once.strategy.sync.step_index, "print": fingerprint(again)},
        "left": [path.name for path in folder.iterdir()],
    }


@scenarios(tuned, kind=KINDS, slow=all_but(kind="fsdp"))
def test_a_learning_rate_finder_and_then_a_fit(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]
    assert facts[0]["suggested"]
    assert facts[0]["after search"] == 0
    assert facts[0]["tuner"]["steps"] == facts[0]["callback"]["steps"] == 4
    assert not [name for name in facts[0]["left"] if "lr_find" in name]


class TwoParts(Direct):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = self.net[:2], self.net[2:]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.head.parameters(), lr=1e-2)


def unfrozen(folder: Path) -> Facts:
    model = TwoParts()
    thaw = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=1e-2)
    before = full_parameters(model)
    trainer(strategy("fsdp"), max_steps=36, callbacks=[thaw]).fit(model, loader(), loader())
    after = full_parameters(model)
    return {"unchanged": [name for name in before if torch.equal(before[name], after[name])]}


@scenarios(unfrozen)
def test_a_callback_unfreezes_after_a_validation(facts: list[Facts]) -> None:
    assert [rank["unchanged"] for rank in facts] == [[], []]


def one_rank(folder: Path, kind: Kind) -> Facts:
    losses = {}
    with listen() as logged:
        for what, name in {"stock": "ddp", "compressed": f"loco2_{kind}"}.items():
            torch.manual_seed(0)
            model = Regression()
            made = trainer(name, max_steps=6)
            made.fit(model, loader())
            losses[what] = model.losses
    sync = made.strategy.sync
    return {
        "losses": losses,
        "logged": logged,
        "residuals": sync.state.nbytes,
        "sent": sync.ranks.peers.sent_nbytes,
        "steps": sync.step_index,
    }


@scenarios(one_rank, world_size=1, kind=KINDS)
def test_one_rank_compresses_nothing_and_that_is_logged_once(facts: list[Facts]) -> None:
    (alone,) = facts
    assert alone["losses"]["stock"] == alone["losses"]["compressed"]
    assert alone["logged"] == ["lowbit_strategy: one rank: gradients are not sent, so nothing is compressed"]
    assert (alone["residuals"], alone["sent"], alone["steps"]) == (0, 0, 6)


class Normalized(Regression):
    """With statistics over the batch."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 8)))


def with_callbacks(folder: Path, kind: Kind) -> Facts:
    model = Normalized()
    text = raised(lambda: fit(kind, model, max_steps=1, sync_batchnorm=True))  # the layers exist for accelerators only
    averaging = [StochasticWeightAveraging(1e-2), EMAWeightAveraging()]
    return {
        "text": text,
        "layer": type(model.net[1]).__name__,
        "averaging": [
            raised(lambda each=each: fit(kind, Regression(), max_epochs=2, callbacks=[each])) for each in averaging
        ],
    }


@scenarios(with_callbacks, kind=("fsdp",))
def test_batch_norm_is_synchronized_and_averaging_refused_under_fsdp(facts: list[Facts]) -> None:
    for rank in facts:
        assert "SyncBatchNorm expected input tensor to be on" in rank["text"]
        for name, error in zip(("StochasticWeightAveraging", "EMAWeightAveraging"), rank["averaging"], strict=True):
            assert error.startswith(f"ValueError: {name} averages weights in a copy of the whole module")
            assert "use a DDP strategy such as loco_ddp" in error


def clipped(folder: Path, kind: Kind) -> Facts:
    warned = {}
    for name, compressor in (("topk", TopK(density=0.1)), ("loco", LoCo(block_size=32))):
        with listen() as logged:
            fit(kind, Regression(), options={"compressor": compressor}, max_steps=1, gradient_clip_val=0.5)
        warned[name] = [line for line in logged if "clips the sparse mean gradient" in line]
    return warned


@scenarios(clipped, kind=KINDS)
def test_clipping_what_a_sparse_method_has_sent_is_warned_of(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["loco"] == []
    assert len(facts[0]["topk"]) == 1
    assert facts[0]["topk"][0].startswith("gradient_clip_val=0.5 clips the sparse mean gradient")
    assert facts[1]["topk"] == []  # rank 0 alone warns


@pytest.mark.slow
def test_processes_that_were_forked_take_their_residuals_with_them(tmp_path: Path) -> None:
    lines = run_script([SCRIPTS / "forked.py"], cwd=tmp_path).stdout.splitlines()
    assert "with residuals 2" in lines  # written by ModelCheckpoint, inside
    assert "warned True" in lines
    assert "resumed 2" in lines
