"""One control of controller, monitor, bounds and record under Lightning, Fabric and Accelerate; what it reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import DGC, DiLoCo, LoCo, custom_loop
from lowbit_strategy.accelerate import LowBitPlugin, MonitorOptions
from lowbit_strategy.control import Accordion, Bounds, Static
from lowbit_strategy.fabric import LowBitDDPStrategy as FabricDDP
from lowbit_strategy.fabric import adapt, monitor
from lowbit_strategy.lightning import AdaptiveCompression, CompressionMonitor
from lowbit_strategy.report.run import read_run
from testing.log import listen
from testing.processes.scenarios import Facts, raised, scenarios
from testing.record import read_record
from testing.training.accelerated import make, prepared, train
from testing.training.regression import KINDS, WIDTH, Regression, loader, mlp, strategy, trainer

EIGHT, TWO = (LoCo(bits=bits, block_size=32) for bits in (8, 2))
ACCORDION = Accordion(light=EIGHT, heavy=TWO, interval=3, unit="steps", eta=0.2)


def both_callbacks(folder: Path, kind: str) -> Facts:
    callbacks = [AdaptiveCompression(ACCORDION), CompressionMonitor(every_n_steps=4)]
    logger = CSVLogger(folder, name="run", version=0)
    with listen() as logged:
        made = trainer(
            strategy(kind, seed=5),
            max_steps=10,
            logger=logger,
            callbacks=callbacks,
            accumulate_grad_batches=2,
            max_epochs=9,
        )
        made.fit(Regression(lr=0.01), loader())
    facts = {"logged": logged, "same": callbacks[0].control is callbacks[1].control}
    if made.is_global_zero:
        facts["record"] = read_record(folder / "run/version_0")
        facts["hparams"] = (folder / "run/version_0/hparams.yaml").read_text()
        facts["csv"] = (folder / "run/version_0/metrics.csv").read_text()
    return facts


@scenarios(both_callbacks, kind=KINDS)
def test_two_callbacks_are_one_control_with_one_record(facts: list[Facts]) -> None:
    assert facts[0]["same"]
    record = facts[0]["record"]
    starts = [line for line in record if line["kind"] == "start"]
    assert len(starts) == 1
    assert starts[0]["controller"] == "Accordion"
    assert starts[0]["configuration"]["controller.light.bits"] == "8"
    assert (starts[0]["num_steps"], starts[0]["every_n_steps"]) == (10, 4)
    observations = [line for line in record if line["kind"] == "observation"]
    assert [line["step"] for line in observations] == [0, 4, 8]
    assert all(line["learning_rate"] == 0.01 and line["loss"] > 0 for line in observations)
    assert all(line["step"] >= 0 for line in record)
    assert "lowbit/share/level_0" in facts[0]["csv"]
    assert "lowbit/compressor: loco(bits=4" in facts[0]["hparams"]
    assert "lowbit/seed: '5'" in facts[0]["hparams"]
    assert any("training starts at the levels that Accordion chose" in line for line in facts[0]["logged"])
    after = facts[0]["logged"][[line.startswith("training starts") for line in facts[0]["logged"]].index(True) :]
    assert any("loco 8-bit" in line for line in after)  # the level in force, not the strategy's compressor


def configuration(folder: Path) -> Facts:
    here = CompressionMonitor(every_n_steps=2, record=folder / "here", progress_bar=False)
    made = trainer(strategy("ddp"), max_steps=2, callbacks=[here])
    made.fit(Regression(), loader())
    return {"record": read_record(folder / "here")} if made.is_global_zero else {}


@scenarios(configuration)
def test_the_record_has_the_compressor_s_configuration(facts: list[Facts]) -> None:
    start = facts[0]["record"][0]
    assert start["compressor"] == "loco(bits=4, block_size=32)"
    assert start["configuration"]["compressor.block_size"] == "32"
    assert start["strategy"] == "LowBitDDPStrategy"


def refused(folder: Path) -> Facts:
    def fit(*callbacks: Any) -> None:
        trainer(strategy("ddp"), callbacks=list(callbacks), max_steps=2).fit(Regression(), loader())

    first, second = (CompressionMonitor(record=folder / "a"), AdaptiveCompression(Static(TWO), record=folder / "b"))
    return {
        "two controllers": raised(lambda: fit(AdaptiveCompression(Static(TWO)), AdaptiveCompression(ACCORDION))),
        "two folders": raised(lambda: fit(first, second)),
        "bounds": raised(lambda: CompressionMonitor(bounds=0.5)),  # type: ignore[arg-type]
        "accelerate's bounds": raised(lambda: MonitorOptions(bounds=0.5)),  # type: ignore[arg-type]
        "record": raised(lambda: CompressionMonitor(record=3)),  # type: ignore[arg-type]
    }


@scenarios(refused)
def test_errors_name_what_to_change(facts: list[Facts]) -> None:
    for rank in facts:
        assert "Static chooses this model's compressors already, so Accordion cannot as well" in rank["two controllers"]
        assert "a run has one record, but its callbacks name several folders" in rank["two folders"]
        for where in ("bounds", "accelerate's bounds"):
            assert "bounds must be an instance of Bounds or a mapping, got 0.5" in rank[where]
        assert "record must be true, false or a folder, got 3" in rank["record"]


def nobody_listens(folder: Path) -> Facts:
    with listen() as trained:
        trainer(strategy("ddp"), max_steps=2, callbacks=[CompressionMonitor()]).fit(Regression(), loader())
    with listen() as accelerated:
        train(prepared(make("ddp", LowBitPlugin(TWO, monitor=MonitorOptions()))), 2)
    with listen() as recorded:
        recording = CompressionMonitor(record=folder / "here")
        trainer(strategy("ddp"), max_steps=2, callbacks=[recording]).fit(Regression(), loader())
    return {"trained": trained, "accelerated": accelerated, "recorded": recorded}


@scenarios(nobody_listens)
def test_a_monitor_without_logger_and_folder_warns(facts: list[Facts]) -> None:
    def warnings(lines: list[str]) -> int:
        return sum("its measurements are lost" in line for line in lines)

    assert [warnings(facts[0][where]) for where in ("trained", "accelerated", "recorded")] == [1, 1, 0]
    assert warnings(facts[1]["trained"]) == 0  # rank 0 alone


class Poisoned(Regression):
    """In the third batch one weight's gradient is not a number, on rank 1."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 and self.global_rank == 1:
            loss = loss + (self.net[2].weight * torch.tensor(float("nan"))).sum()
        return loss


def not_finite(folder: Path) -> Facts:
    watch = CompressionMonitor(every_n_steps=1, record=folder / "here", progress_bar=False)
    with listen() as logged:
        made = trainer(strategy("ddp"), max_steps=3, callbacks=[watch])
        made.fit(Poisoned(optimizer="plain"), loader())
    record = read_record(folder / "here") if made.is_global_zero else []
    return {"logged": logged, "warnings": [line for line in record if line["kind"] == "warning"]}


@scenarios(not_finite)
def test_gradients_that_are_not_finite_are_warned_of(facts: list[Facts]) -> None:
    assert [line["step"] for line in facts[0]["warnings"]] == [2]
    assert "gradients are not finite: net." in facts[0]["warnings"][0]["text"]
    assert any(line.startswith("step 2: gradients are not finite: net.") for line in facts[0]["logged"])


def in_a_loop(folder: Path) -> Facts:
    """Fabric: the record of a controller and a monitor, as the report reads it."""
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=FabricDDP(LoCo(block_size=32)))
    fabric.launch()
    net = mlp()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.05))
    adapt(fabric, ACCORDION, num_steps=7)
    bounds = Bounds(max_error=1e-4, patience=1)
    monitor(fabric, every_n_steps=3, bounds=bounds, optimizer=optimizer, record=folder / "loop")
    losses = []
    for step in range(7):
        torch.manual_seed(2 * step + fabric.global_rank)
        loss = (model(torch.randn(4, WIDTH)) - 1).square().mean()
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    if not fabric.is_global_zero:
        return {}
    run = read_run(folder / "loop")
    return {"losses": losses, "run": run, "curves": run.losses()}


@scenarios(in_a_loop)
def test_a_record_of_fabric_has_losses_decisions_and_the_learning_rate(facts: list[Facts]) -> None:
    run, losses = facts[0]["run"], facts[0]["losses"]
    assert run.start["num_steps"] == 7
    assert run.start["controller"] == "Accordion"
    assert [line["loss"] for line in run.observations] == [losses[step] for step in (0, 3, 6)]
    assert facts[0]["curves"]["training loss"].steps == [0, 3, 6]
    assert all(line["learning_rate"] == 0.05 for line in run.observations)
    assert run.switches
    assert run.levels
    assert run.warnings


def epochs_in_rounds(folder: Path) -> Facts:
    """The first decision comes after nine steps."""
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    session = custom_loop.compress(model, optimizer, LoCo(block_size=32), outer=DiLoCo(every=9))
    custom_loop.adapt(session.sync, Accordion(light=EIGHT, heavy=TWO))
    return {"first step": raised(model(torch.ones(4, WIDTH)).sum().backward)}


@scenarios(epochs_in_rounds)
def test_what_a_controller_lacks_is_said_in_the_first_step(facts: list[Facts]) -> None:
    for rank in facts:
        assert "the controller counts in epochs, but nothing counts them here" in rank["first step"]


MOMENTUM = DGC(density=0.1, momentum=0.9)


def momentum_twice(folder: Path, where: str) -> Facts:
    """DGC applies momentum, and so does the optimizer."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

    def train_with_it() -> None:
        if where == "lightning":
            trainer(strategy("ddp", MOMENTUM), max_steps=2).fit(Regression(optimizer="sgd"), loader())
        elif where == "fabric":
            fabric = L.Fabric(accelerator="cpu", devices=2, strategy=FabricDDP(MOMENTUM))
            fabric.launch()
            fabric.setup(net, optimizer)
        else:
            make("ddp", LowBitPlugin(MOMENTUM)).prepare(net, optimizer)

    return {"error": raised(train_with_it)}


@scenarios(momentum_twice, where=("lightning", "fabric", "accelerate"))
def test_momentum_in_the_optimizer_too_is_refused(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["error"].startswith("ValueError: momentum is applied twice: 0.9 by the compressor and 0.9 by")
