"""CompressionMonitor and AdaptiveCompression in real Lightning runs on two ranks."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.loggers import CSVLogger as FabricCSV
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowbit_strategy import LocalSGD, LoCo, PostLocalSGD, TopK
from lowbit_strategy.control import (
    Accordion,
    AccordionBatch,
    AdaQS,
    Bounds,
    Decision,
    GraVAC,
    Guard,
    Phase,
    Schedule,
    Static,
    Telemetry,
)
from lowbit_strategy.fabric import LowBitDDPStrategy as FabricDDP
from lowbit_strategy.fabric import LowBitFSDPStrategy as FabricFSDP
from lowbit_strategy.fabric import adapt, monitor
from lowbit_strategy.lightning import AdaptiveCompression, CompressionMonitor
from lowbit_strategy.telemetry.observe import Observer
from testing.processes.scenarios import Facts, all_but, raised, scenarios
from testing.record import read_record
from testing.training.comparing import fingerprint
from testing.training.regression import KINDS, OUTPUTS, WIDTH, Regression, loader, mlp, strategy, trainer

EIGHT, FOUR, TWO = (LoCo(bits=bits, block_size=32) for bits in (8, 4, 2))


def monitoring(folder: Path, kind: str) -> Facts:
    monitor = CompressionMonitor(every_n_steps=4)
    loggers = [CSVLogger(folder, name="csv", version=0), TensorBoardLogger(folder, name="tb", version=0)]
    made = trainer(strategy(kind), max_steps=10, logger=loggers, callbacks=[monitor], log_every_n_steps=3)
    made.fit(Regression(), loader())
    facts = {"last": monitor.last, "bar": dict(made.progress_bar_metrics), "rank": made.global_rank}
    if made.is_global_zero:
        facts["csv"] = (folder / "csv" / "version_0" / "metrics.csv").read_text()
        facts["record"] = read_record(folder / "csv" / "version_0")
        facts["tb"] = sorted(path.name[:6] for path in (folder / "tb" / "version_0").iterdir())
    return facts


@scenarios(monitoring, kind=KINDS, slow=all_but(kind="ddp"))
def test_figures_reach_every_logger_the_bar_and_the_record(facts: list[Facts]) -> None:
    assert facts[0]["last"] == facts[1]["last"]
    lead = facts[0]
    header, *rows = lead["csv"].splitlines()
    columns = header.split(",")
    assert {"lowbit/relative_error", "lowbit/comm_ms", "lowbit/bits_per_element/net.N.weight"} <= set(columns)
    observed = [row.split(",") for row in rows if row.split(",")[columns.index("lowbit/cosine")]]
    assert [int(row[columns.index("step")]) for row in observed] == [0, 4, 8]
    assert "events" in lead["tb"]
    assert lead["bar"]["error"] == pytest.approx(lead["last"].total.relative_error, rel=1e-5)
    kinds = [line["kind"] for line in lead["record"]]
    assert kinds == ["start", "observation", "observation", "observation"]
    first = lead["record"][1]
    assert first["loss"] > 0
    assert 4 < first["groups"]["net.*.weight"]["bits_per_element"] < 8
    assert first["groups"]["net.*.bias"]["compressed"] is False


def overhead(folder: Path, kind: str) -> Facts:
    """Losses with and without a monitor; how often it measured."""
    losses, calls = [], []
    for callbacks in ([], [CompressionMonitor(every_n_steps=5, progress_bar=False)]):
        model = Regression()
        with torch.random.fork_rng():
            made = trainer(strategy(kind), callbacks=callbacks, max_steps=8)
            original = Observer.observe

            def counted(self: Observer, *args: Any, original: Any = original) -> Any:
                calls.append(self.sync.step_index)
                return original(self, *args)

            Observer.observe = counted
            made.fit(model, loader())
            Observer.observe = original
        losses.append(model.losses)
    return {"losses": losses, "steps": sorted(set(calls)), "files": [path.name for path in folder.iterdir()]}


@scenarios(overhead, kind=KINDS, slow=all_but(kind="ddp"))
def test_watching_changes_nothing_and_happens_on_its_steps_only(facts: list[Facts]) -> None:
    for fact in facts:
        assert fact["steps"] == [0, 5]


CONTROLLERS: dict[str, Any] = {
    "accordion": lambda: Accordion(light=EIGHT, heavy=TWO, interval=3, unit="steps", eta=0.2),
    "gravac": lambda: GraVAC(candidates=(EIGHT, FOUR, TWO), window=2, omega=0.0),
    "schedule": lambda: Schedule(
        [Phase(compressor=EIGHT), Phase(compressor=TopK(density=0.05), start=0.4, unit="fraction")]
    ),
    "adaqs": lambda: AdaQS(ladder=(EIGHT, FOUR, TWO), interval=2, factor=0.99, ewma=1.0),
    "guard": lambda: Guard(
        inner=Static(TWO), bounds=Bounds(max_error=0.2, patience=1), fallback=EIGHT, observe_every=3
    ),
}


def adapting(folder: Path, kind: str, controller: str) -> Facts:
    callback = AdaptiveCompression(CONTROLLERS[controller]())
    logger = CSVLogger(folder, name="run", version=0)
    num_steps = 60 if controller == "adaqs" else 12  # it waits for gradients to become noisier
    made = trainer(strategy(kind), max_steps=num_steps, callbacks=[callback], logger=logger, log_every_n_steps=1)
    model = Regression()
    made.fit(model, loader())
    assert callback.driver is not None
    facts = {"levels": dict(callback.driver.levels), "print": fingerprint(model), "losses": model.losses}
    if made.is_global_zero:
        facts["record"] = read_record(folder / "run" / "version_0")
        facts["csv"] = (folder / "run" / "version_0" / "metrics.csv").read_text().splitlines()[0]
    return facts


@scenarios(adapting, kind=KINDS, controller=tuple(CONTROLLERS), slow=all_but(kind="ddp"))
def test_controllers_decide_alike_and_tell(facts: list[Facts]) -> None:
    assert facts[0]["levels"] == facts[1]["levels"]
    assert facts[0]["print"] == facts[1]["print"]
    assert facts[0]["losses"][-1] < facts[0]["losses"][0]
    switches = [line for line in facts[0]["record"] if line["kind"] == "switch"]
    assert switches
    assert all(line["reason"] for line in switches)
    shares = [line["shares"] for line in facts[0]["record"] if line["kind"] == "levels"]
    assert all(sum(share.values()) == pytest.approx(1) for share in shares)
    assert "lowbit/share/level_0" in facts[0]["csv"]


RESUMABLE = ("accordion", "schedule", "guard")


class Manual(Regression):
    """Two optimizers on one backward pass."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        loss = self.loss(batch)
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        return [torch.optim.SGD([first], lr=self.lr), torch.optim.SGD(others, lr=self.lr)]


class Numbered(Regression):
    """Batches that depend on the step alone: Lightning does not resume its data loaders where they stopped."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(2 * self.global_step + self.global_rank)
        x = torch.randn(4, WIDTH, generator=generator)
        return super().training_step((x, torch.tanh(x[:, :OUTPUTS] - x[:, OUTPUTS : 2 * OUTPUTS])), batch_idx)


def levels_by_step(adaptive: AdaptiveCompression) -> tuple[Callback, list[dict[str, int]]]:
    levels: list[dict[str, int]] = []

    class Keep(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            levels.append(dict(adaptive.driver.levels))

    return Keep(), levels


def resuming(folder: Path, kind: str, controller: str) -> Facts:
    """Uninterrupted, then resumed by new objects from a checkpoint in the middle of a phase."""
    runs = []
    for resumed in (False, True):
        torch.manual_seed(resumed)
        model, adaptive = Numbered(), AdaptiveCompression(CONTROLLERS[controller]())
        keep, levels = levels_by_step(adaptive)
        saver = ModelCheckpoint(folder, every_n_train_steps=7, save_top_k=-1, filename="{step}")
        callbacks = [adaptive, keep] if resumed else [adaptive, keep, saver]
        made = trainer(strategy(kind), max_steps=14, callbacks=callbacks, enable_checkpointing=not resumed)
        made.fit(model, loader(), ckpt_path=folder / "step=7.ckpt" if resumed else None)
        runs.append({"losses": model.losses, "levels": levels, "print": fingerprint(model)})
    return {"whole": runs[0], "resumed": runs[1]}


@scenarios(resuming, kind=KINDS, controller=RESUMABLE, slow=all_but(kind="ddp"))
def test_stopped_in_a_phase_and_resumed_is_as_never_stopped(facts: list[Facts]) -> None:
    for fact in facts:
        whole, resumed = fact["whole"], fact["resumed"]
        assert resumed["levels"] == whole["levels"][7:]
        assert resumed["losses"] == whole["losses"][7:]
        assert resumed["print"] == whole["print"]
        assert len({tuple(levels.items()) for levels in whole["levels"]}) > 1


def growing_batches(folder: Path, kind: str) -> Facts:
    callback = AdaptiveCompression(AccordionBatch(small=1, large=4, interval=4, unit="steps"))
    model = Regression(optimizer="sgd", lr=1e-3)
    made = trainer(strategy(kind), max_steps=16, max_epochs=20, callbacks=[callback])
    during: list[float] = []
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: during.append(optimizer.param_groups[0]["lr"]))
    try:
        made.fit(model, loader())
    finally:
        hook.remove()
    return {
        "during": during,
        "after": made.optimizers[0].param_groups[0]["lr"],
        "accumulation": made.accumulate_grad_batches,
        "batches": len(model.losses),
    }


@scenarios(growing_batches, kind=KINDS, slow=all_but(kind="ddp"))
def test_batches_grow_with_the_learning_rate_which_is_put_back(facts: list[Facts]) -> None:
    for fact in facts:
        num_small = fact["during"].count(1e-3)
        assert fact["during"] == [1e-3] * num_small + [4e-3] * (16 - num_small)
        assert 8 <= num_small < 16
        assert fact["batches"] == num_small + 4 * (16 - num_small)
        assert fact["accumulation"] == 4
        assert fact["after"] == 1e-3


class Warmed(Static):
    """Multiplies learning rates, and changes no batch."""

    def decide(self, telemetry: Telemetry, state: dict[str, Any]) -> Decision:
        return replace(super().decide(telemetry, state), learning_rate_factor=4.0)


def rates(folder: Path, case: str) -> Facts:
    """The rate at rest and in each of the optimizer's steps, where engine's steps are not the optimizer's."""
    at_rest: list[float] = []

    class AtRest(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            at_rest.append(trainer.optimizers[0].param_groups[0]["lr"])

    during: list[float] = []

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(optimizer is each for each in made.optimizers):  # and not the outer one
            during.append(optimizer.param_groups[0]["lr"])

    hook = register_optimizer_step_post_hook(after_step)
    adaptive = AdaptiveCompression(Warmed(FOUR))
    options = {"outer": LocalSGD(every=3)} if case == "local" else {}
    made = trainer(strategy("ddp", **options), max_steps=12, callbacks=[AtRest(), adaptive])
    try:
        made.fit({"local": Regression, "manual": Manual}[case](optimizer="plain", lr=1e-3), loader())
    finally:
        hook.remove()
    return {"rest": at_rest, "during": during}


@scenarios(rates, case=("local", "manual"))
def test_a_factor_is_a_matter_of_each_step_of_the_optimizer(facts: list[Facts]) -> None:
    for rank in facts:
        assert set(rank["rest"]) == {1e-3}
        assert set(rank["during"]) <= {1e-3, 4e-3}
        assert rank["during"][-1] == 4e-3


def bounded(folder: Path) -> Facts:
    bounds = Bounds(max_error=1e-3, patience=2)
    monitor = CompressionMonitor(every_n_steps=2, bounds=bounds, record=folder / "here")
    made = trainer(strategy("ddp", TWO), callbacks=[monitor], max_steps=8)
    made.fit(Regression(), loader())
    return {"record": read_record(folder / "here")} if made.is_global_zero else {}


@scenarios(bounded)
def test_the_monitor_warns(facts: list[Facts]) -> None:
    warnings = [line for line in facts[0]["record"] if line["kind"] == "warning"]
    assert [line["step"] for line in warnings] == [2]
    assert "net.*.weight: relative error" in warnings[0]["text"]


def refused(folder: Path) -> Facts:
    from lightning.pytorch.strategies import DDPStrategy

    def fit(callback: Any) -> None:
        trainer(DDPStrategy(), callbacks=[callback]).fit(Regression(), loader())

    def batches(model: Any = None, *callbacks: Callback, **options: Any) -> str:
        adaptive = AdaptiveCompression(AccordionBatch(interval=2, unit="steps"))
        made = trainer(strategy("ddp", **options), max_steps=2, callbacks=[adaptive, *callbacks])
        return raised(lambda: made.fit(model or Regression(), loader()))

    return {
        "local": batches(outer=LocalSGD(every=3)),
        "local later": batches(outer=PostLocalSGD(every=3, synchronous=100)),
        "manual": batches(Manual()),
        "two": batches(None, GradientAccumulationScheduler({0: 2})),
        "monitor": raised(lambda: fit(CompressionMonitor())),
        "adaptive": raised(lambda: fit(AdaptiveCompression(Static(FOUR)))),
        "controller": raised(lambda: AdaptiveCompression(FOUR)),
        "interval": raised(lambda: CompressionMonitor(every_n_steps=0)),
    }


@scenarios(refused)
def test_errors_name_what_to_change(facts: list[Facts]) -> None:
    assert 'strategy is DDPStrategy: use Trainer(strategy="loco_ddp")' in facts[0]["monitor"]
    assert "AdaptiveCompression needs" in facts[0]["adaptive"]
    assert "controller must be one of" in facts[0]["controller"]
    assert "every_n_steps must be a positive integer" in facts[0]["interval"]
    assert "AccordionBatch does not support rounds of several steps" in facts[0]["local"]
    assert "AccordionBatch does not support rounds of several steps" in facts[0]["local later"]
    assert "which manual optimization handles itself" in facts[0]["manual"]
    assert "and so does GradientAccumulationScheduler" in facts[0]["two"]


def test_both_namespaces_have_callbacks_of_their_own() -> None:
    for framework in ("lightning.pytorch", "pytorch_lightning"):
        ours = importlib.import_module(f"lowbit_strategy.{framework.split('.')[0]}")
        callback = importlib.import_module(f"{framework}.callbacks").Callback
        assert issubclass(ours.CompressionMonitor, callback)
        assert issubclass(ours.AdaptiveCompression, callback)


def fabric_loop(folder: Path, kind: str) -> Facts:
    """The same controllers in a loop of one's own: stopped at step 5, resumed by new objects."""

    def run(stop: int, load: bool) -> Facts:
        torch.manual_seed(load)
        strategy = FabricDDP(LoCo(block_size=32)) if kind == "ddp" else FabricFSDP(LoCo(block_size=32))
        fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy, loggers=[FabricCSV(folder, name=str(load))])
        fabric.launch()
        net = mlp()
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.5))
        driver = adapt(fabric, CONTROLLERS["accordion"](), optimizer=optimizer)
        monitor(fabric, every_n_steps=4, record=folder / f"record-{load}")
        state = {"model": model, "optimizer": optimizer, "step": 0}
        if load:
            fabric.load(folder / "here.ckpt", state)
        losses, levels = [], []
        for step in range(state["step"], stop):
            generator = torch.Generator().manual_seed(2 * step + fabric.global_rank)
            x = torch.randn(4, WIDTH, generator=generator)
            loss = (model(x) - x[:, :OUTPUTS]).square().mean()
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            losses.append(loss.item())
            levels.append(dict(driver.levels))
            if step == 4 and not load:
                fabric.save(folder / "here.ckpt", {**state, "step": 5})
        return {"losses": losses, "levels": levels}

    whole, resumed = run(11, load=False), run(11, load=True)
    return {"whole": whole, "resumed": resumed, "record": read_record(folder / "record-False")}


@scenarios(fabric_loop, kind=KINDS, slow=all_but(kind="ddp"))
def test_under_fabric(facts: list[Facts]) -> None:
    for fact in facts:
        assert fact["resumed"] == {name: values[5:] for name, values in fact["whole"].items()}
    assert [line["step"] for line in facts[0]["record"] if line["kind"] == "observation"] == [0, 4, 8]
