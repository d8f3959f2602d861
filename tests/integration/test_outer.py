"""Local steps with an outer optimizer through Lightning's Trainer, on two real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    LambdaCallback,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lowbit_strategy import (
    OUTER_RULES,
    QSGD,
    AdaComm,
    Dense,
    DiLoCo,
    EagerDiLoCo,
    LocalSGD,
    LoCo,
    PostLocalSGD,
    Quadratic,
)
from lowbit_strategy.checkpoint.capture import capture
from lowbit_strategy.checkpoint.restoring import restore
from lowbit_strategy.custom_loop import compress
from lowbit_strategy.lightning import CompressionMonitor, LowBitDDPStrategy
from testing.log import listen
from testing.processes.scenarios import Facts, all_but, scenarios
from testing.record import read_record
from testing.training.comparing import fingerprint, full_parameters
from testing.training.regression import WIDTH, ByStep, Regression, dataset, loader, mlp, trainer

STREAMING = DiLoCo(every=6, momentum=0.5, fragments=3, delay=1, mix=0.5)
RULES = {
    "diloco": DiLoCo(every=4, momentum=0.5),
    "streaming": STREAMING,
    "eager": EagerDiLoCo(every=6, momentum=0.5, fragments=2),
    "synchronous first": DiLoCo(
        every=AdaComm(start=4, minimum=2),
        momentum=0.5,
        synchronous=2,
        synchronous_compressor=QSGD(bits=8),
    ),
}


def outer_strategy(rule: Any, compressor: Any = None, **options: Any) -> LowBitDDPStrategy:
    return LowBitDDPStrategy(compressor or LoCo(block_size=32, beta=0.0, reset_steps=None), outer=rule, **options)


def every_step(folder: Path) -> Facts:
    weights = {}
    for name, strategy in {"ddp": "ddp", "outer": outer_strategy(LocalSGD(every=1), Dense())}.items():
        torch.manual_seed(0)
        model = Regression(optimizer="plain", lr=0.1)
        trainer(strategy, max_steps=20).fit(model, loader())
        weights[name] = torch.cat([value.reshape(-1) for value in full_parameters(model).values()])
    return {"print": fingerprint(model), "distance": (weights["ddp"] - weights["outer"]).abs().max().item()}


@scenarios(every_step)
def test_the_mean_after_every_step_is_synchronous_training(facts: list[Facts]) -> None:
    assert facts[0]["print"] == facts[1]["print"]
    assert facts[0]["distance"] < 1e-6


class Fingerprints(Callback):
    """Of the weights at the moments at which someone else looks at them."""

    def __init__(self) -> None:
        self.seen: dict[str, list[int]] = {"validation": [], "step": []}

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen["validation"].append(fingerprint(pl_module))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.seen["step"].append(fingerprint(pl_module))


def training(folder: Path, rule: str) -> Facts:
    prints, model = Fingerprints(), Regression()
    saver = ModelCheckpoint(folder, every_n_train_steps=10, save_top_k=-1, filename="{step}")
    options: dict[str, Any] = {"callbacks": [prints, saver], "enable_checkpointing": True, "num_sanity_val_steps": 0}
    with listen() as logged:
        made = trainer(outer_strategy(RULES[rule]), max_steps=22, val_check_interval=6, **options)
        made.fit(model, loader(), loader())
    saved = torch.load(folder / "step=10.ckpt", weights_only=True)["state_dict"]
    sync = made.strategy.sync
    return {
        "losses": model.losses,
        "print": fingerprint(model),
        "seen": prints.seen,
        "saved": {name: value.sum().item() for name, value in saved.items()},
        "steps": sync.step_index,
        "global steps": made.global_step,
        "sent": sync.ranks.peers.sent_nbytes,
        "logged": logged,
    }


@scenarios(training, rule=tuple(RULES), slow=all_but(rule=("diloco", "eager", "synchronous first")))
def test_ranks_train_by_themselves_and_end_with_the_same_weights(facts: list[Facts]) -> None:
    first, second = facts
    assert first["print"] == second["print"]
    assert first["seen"]["validation"] == second["seen"]["validation"]
    assert first["seen"]["step"][2] != second["seen"]["step"][2]
    for rank in facts:
        assert rank["steps"] == rank["global steps"] == 22
        assert rank["losses"][-1] < 0.8 * rank["losses"][0]


def resume(folder: Path, rule: str) -> Facts:
    saver = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    whole = ByStep()
    saving = {"enable_checkpointing": True, "callbacks": [saver]}
    trainer(outer_strategy(RULES[rule]), max_steps=14, **saving).fit(whole, loader())
    same = []
    for step in (5, 6, 9):
        model = ByStep()
        source = folder / f"step={step}.ckpt"
        trainer(outer_strategy(RULES[rule]), max_steps=14).fit(model, loader(), ckpt_path=source)
        same.append({"bits": fingerprint(whole) == fingerprint(model), "losses": model.losses == whole.losses[step:]})
    return {"same": same}


@scenarios(resume, rule=tuple(RULES), slow=all_but(rule=("streaming",)))
def test_resume_in_the_middle_of_a_round_is_as_if_never_stopped(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["same"] == [{"bits": True, "losses": True}] * 3


def by_name(folder: Path, name: str) -> Facts:
    model = Regression()
    with listen() as logged:
        made = trainer(name, max_steps=33)
        made.fit(model, loader())
    sync = made.strategy.sync
    return {
        "print": fingerprint(model),
        "sent": sync.ranks.peers.sent_nbytes,
        "logged": logged,
        "turns": sync.rounds.num_syncs,
    }


@scenarios(by_name, name=[f"{name}_ddp" for name in OUTER_RULES if name != "postlocalsgd"])
def test_by_name(facts: list[Facts]) -> None:
    assert facts[0]["print"] == facts[1]["print"]
    assert facts[0]["turns"] == facts[1]["turns"] >= 2
    text = "\n".join(facts[0]["logged"])
    assert "compressed pseudo-gradient all-reduce over 2 ranks" in text
    assert "per round of 30 steps" in text
    assert "/step on average" in text


def synchronous_first(folder: Path) -> Facts:
    prints, model = Fingerprints(), ByStep()
    saver = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    rule = PostLocalSGD(every=4, synchronous=5, synchronous_compressor=QSGD(bits=8))
    made = trainer(outer_strategy(rule), max_steps=12, callbacks=[prints, saver], enable_checkpointing=True)
    made.fit(model, loader())
    again = []
    for step in (3, 5, 9):
        resumed = ByStep()
        trainer(outer_strategy(rule), max_steps=12).fit(resumed, loader(), ckpt_path=folder / f"step={step}.ckpt")
        again.append(fingerprint(resumed))
    label = made.strategy.sync.compressor.name
    return {"steps": prints.seen["step"], "print": fingerprint(model), "again": again, "last": label}


@scenarios(synchronous_first)
def test_the_first_steps_are_synchronous(facts: list[Facts]) -> None:
    first, second = facts
    same = [a == b for a, b in zip(first["steps"], second["steps"], strict=True)]
    assert same == [True] * 5 + [False, False, False, True] + [False] * 3
    assert first["print"] == second["print"]
    assert first["again"] == [first["print"]] * 3
    assert first["last"] == "loco"


class Normalized(Regression):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 8)))


def user_options(folder: Path) -> Facts:
    """Accumulation, clipping, BatchNorm, a schedule, averaged weights, a rule that follows the learning rate."""
    averaging = EMAWeightAveraging(decay=0.9)
    swa = StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)
    facts: Facts = {}
    for name, callback in {"ema": averaging, "swa": swa}.items():
        model = Normalized()
        rule = DiLoCo(every=Quadratic(alpha=0.05, minimum=2), momentum=0.5)
        made = trainer(
            outer_strategy(rule),
            max_steps=-1,
            max_epochs=3,
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
            callbacks=[callback],
        )
        made.fit(model, loader())
        sync = made.strategy.sync
        facts[name] = {"print": fingerprint(model), "steps": sync.step_index, "global steps": made.global_step}
        made.test(model, loader(), verbose=False)
    average = averaging._average_model
    facts["average"] = fingerprint(average.module)
    return facts


@scenarios(user_options)
def test_what_users_switch_on(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]
    assert facts[0]["ema"]["steps"] == facts[0]["ema"]["global steps"] == 18


class TwoOptimizers(Regression):
    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        parts = (self.net[:2].parameters(), self.net[2:].parameters())
        return [torch.optim.SGD(part, lr=0.05, momentum=0.9) for part in parts]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()


def two_optimizers(folder: Path) -> Facts:
    model = TwoOptimizers()
    made = trainer(outer_strategy(DiLoCo(every=3)), max_steps=14)
    made.fit(model, loader())
    return {
        "print": fingerprint(model),
        "steps": made.strategy.sync.step_index,
        "turns": made.strategy.sync.rounds.num_syncs,
    }


@scenarios(two_optimizers)
def test_several_optimizers_step_together(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]
    assert facts[0]["steps"] == 7
    assert facts[0]["turns"] == 3


class Uneven(Regression):
    def train_dataloader(self) -> Any:
        return DataLoader(dataset(8 * (3 + 4 * self.global_rank)), batch_size=4)


def static_graph(folder: Path, first: str) -> Facts:
    """DDP reduces a static graph at the end of its first backward pass, unless steps are local by then."""
    model = DistributedDataParallel(mlp(), static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rule = PostLocalSGD(synchronous=3, every=2) if first == "synchronous" else DiLoCo(every=3)
    session = compress(model, optimizer, "loco", outer=rule)
    for step in range(6):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    session.finish()
    session.close()
    return {"weights": torch.cat([param.detach().view(-1) for param in model.parameters()])}


@scenarios(static_graph, first=("local", "synchronous"))
def test_a_static_graph(facts: list[Facts]) -> None:
    assert torch.equal(facts[0]["weights"], facts[1]["weights"])


def uneven(folder: Path) -> Facts:
    model = Uneven()
    made = trainer(outer_strategy(STREAMING), max_steps=-1, max_epochs=1, use_distributed_sampler=False)
    made.fit(model)
    return {"print": fingerprint(model), "steps": made.global_step}


@scenarios(uneven)
def test_a_rank_that_has_no_more_data_takes_part_until_the_others_are_done(facts: list[Facts]) -> None:
    assert facts[0]["print"] == facts[1]["print"]
    assert [rank["steps"] for rank in facts] == [6, 14]


def scaled(folder: Path) -> Facts:
    """One rank overflows: its optimizer skips, its step counts."""
    model = Overflowing()
    precision = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    made = trainer(outer_strategy(DiLoCo(every=3)), max_steps=7, plugins=[precision])
    made.fit(model, loader())
    return {
        "print": fingerprint(model),
        "steps": made.strategy.sync.step_index,
        "scale": precision.scaler.get_scale(),
        "finite": all(bool(param.isfinite().all()) for param in model.parameters()),
    }


class Overflowing(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if self.global_rank == 1 and self.global_step == 1 else loss


@scenarios(scaled)
def test_attempted_steps_count_alike_on_all_ranks(facts: list[Facts]) -> None:
    assert facts[0]["print"] == facts[1]["print"]
    assert [rank["steps"] for rank in facts] == [7, 7]
    assert [rank["scale"] for rank in facts] == [1024.0, 512.0]
    assert facts[0]["finite"]


def ended_twice(folder: Path) -> Facts:
    """A plain loop calls `end_step` after steps that end by themselves, as pages ask for with a loss scaler."""
    found = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=4.0)):
        model = DistributedDataParallel(nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        session = compress(model, optimizer, outer=DiLoCo(every=4), scaler=scaler)
        for step in range(6):
            loss = model(torch.full((2, 8), float("inf") if step == 2 and scaler is not None else 1.0)).sum()
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            session.end_step(optimizer, scaler)
            optimizer.zero_grad()
        found.append((session.sync.step_index, session.sync.rounds.num_syncs))  # type: ignore[union-attr]
        session.close()
    return {"found": found}


@scenarios(ended_twice)
def test_a_step_that_ended_by_itself_counts_once(facts: list[Facts]) -> None:
    assert all(rank["found"] == [(6, 1), (6, 1)] for rank in facts)


def second_fit(folder: Path, rule: str) -> Facts:
    model, is_local = Regression(), []
    noting = LambdaCallback(on_train_start=lambda made, _: is_local.append(made.strategy.sync.rounds is not None))
    made = trainer(outer_strategy(RULES[rule]), max_steps=5, callbacks=[noting])
    made.fit(model, loader())
    made.fit_loop.epoch_loop.max_steps = 11
    made.fit(model, loader())
    return {"print": fingerprint(model), "steps": made.strategy.sync.step_index, "local": is_local}


@scenarios(second_fit, rule=("diloco", "synchronous first"))
def test_a_second_fit_goes_on(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]
    assert facts[0]["steps"] == 11
    assert facts[0]["local"][1], "the second fit begins where the first one ended"


class Freezing(Regression):
    def on_train_start(self) -> None:
        self.net[0].requires_grad_(True)


def unfrozen(folder: Path) -> Facts:
    model = Freezing()
    model.net[0].requires_grad_(False)
    before = model.net[0].weight.clone()
    made = trainer(outer_strategy(STREAMING), max_steps=9)
    model.configure_optimizers = lambda: torch.optim.Adam(model.parameters(), lr=1e-2)  # type: ignore[method-assign]
    made.fit(model, loader())
    return {"print": fingerprint(model), "trained": not torch.equal(before, model.net[0].weight)}


@scenarios(unfrozen)
def test_parameters_that_are_unfrozen(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]
    assert facts[0]["trained"]


def other_world(folder: Path, rule: str) -> Facts:
    """Saved by two ranks, gone on with by one of another layout: here a file of three is made up from those of two."""
    saver = ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=-1, filename="{step}")
    made = trainer(outer_strategy(RULES[rule]), max_steps=5, callbacks=[saver], enable_checkpointing=True)
    made.fit(ByStep(), loader())
    saved = capture(made.strategy.sync)
    saved |= {"world_size": 3, "topologies": [[3, 3, 1, 0]]}
    model = ByStep()
    fresh = trainer(outer_strategy(RULES[rule]), max_steps=1)
    fresh.fit(model, loader())
    local, sync = fresh.strategy.session.pace, fresh.strategy.sync
    restore(sync, saved, load_rank=lambda _: saved, on_world_size_change="reset")
    local.resume()
    anchors = local.outer.anchors
    return {
        "shared": all(torch.equal(param, anchors[name]) for name, param in local.outer.model.params.items()),
        "step": sync.step_index,
        "print": fingerprint(model),
    }


@scenarios(other_world, rule=("streaming", "eager"))
def test_another_number_of_ranks_goes_on_from_the_anchors(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]
    assert facts[0]["shared"]
    assert facts[0]["step"] == 5


def monitored(folder: Path) -> Facts:
    monitor = CompressionMonitor(every_n_steps=4, record=str(folder))
    made = trainer(outer_strategy(DiLoCo(every=3)), max_steps=13, callbacks=[monitor])
    made.fit(Regression(), loader())
    observations = [entry for entry in read_record(folder) if entry["kind"] == "observation"]
    return {"steps": [entry["step"] for entry in observations], "drift": [entry["drift"] for entry in observations]}


@scenarios(monitored)
def test_the_monitor_shows_the_drift_between_ranks(facts: list[Facts]) -> None:
    assert facts[0]["steps"] == [6, 9, 12]
    assert all(drift > 0 for drift in facts[0]["drift"])
