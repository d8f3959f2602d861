"""Controllers and the monitor in Accelerate loops: DDP and FSDP2, two real processes."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import skip_first_batches
from accelerate.tracking import GeneralTracker
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowbit_strategy import LoCo, TopK
from lowbit_strategy.accelerate import LowBitPlugin, MonitorOptions, binding_of
from lowbit_strategy.control import (
    Accordion,
    AccordionBatch,
    Bounds,
    Controller,
    GraVAC,
    Guard,
    Phase,
    Schedule,
    Static,
)
from testing.processes.scenarios import Facts, all_but, raised, scenarios
from testing.record import read_record
from testing.training.accelerated import Job, Kind, loss_of, make, prepared, state_folder
from testing.training.comparing import fingerprint
from testing.training.regression import mlp

KINDS = ("ddp", "fsdp")
EIGHT, FOUR, TWO = (LoCo(bits=bits, block_size=32) for bits in (8, 4, 2))
CONTROLLERS: dict[str, Controller] = {
    "accordion": Accordion(light=EIGHT, heavy=TWO, interval=3, unit="steps", eta=0.2),
    "epochs": Accordion(light=EIGHT, heavy=TWO, interval=1, eta=10.0),
    "gravac": GraVAC(candidates=(EIGHT, FOUR, TWO), window=2, omega=0.0),
    "schedule": Schedule([Phase(compressor=EIGHT), Phase(compressor=TopK(density=0.05), start=0.4, unit="fraction")]),
    "guard": Guard(inner=Static(TWO), bounds=Bounds(max_error=0.2, patience=1), fallback=EIGHT, observe_every=3),
}
NUM_STEPS, EPOCH = 12, 4  # steps in all and in an epoch


class Logged(NamedTuple):
    step: int | None
    values: dict[str, Any]


class Kept(GeneralTracker):
    """Keeps what is logged."""

    name = "kept"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[Logged] = []
        self.configuration: dict[str, Any] = {}

    @property
    def tracker(self) -> list[Logged]:
        return self.logged

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.configuration |= values

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.logged.append(Logged(step, dict(values)))


def job_of(
    kind: Kind, controller: Controller | None, *, accumulate: int = 1, trackers: Any = None, **options: Any
) -> Job:
    plugin = LowBitPlugin(FOUR, controller=controller, **{"num_steps": NUM_STEPS, **options})
    more = {"log_with": trackers} if trackers else {}
    accelerator = make(kind, plugin, accumulate=accumulate, **more)
    if trackers:
        accelerator.init_trackers("test")
    return prepared(accelerator, num_samples=2 * 8 * EPOCH)


def go(job: Job, until: int, *, start: int = 0) -> list[dict[str, int]]:
    """Epoch after epoch, from step `start` to step `until`; the levels in force in every step."""
    binding = binding_of(job.accelerator)
    assert binding is not None
    levels, step = [], start
    while step < until:
        skip = step % EPOCH
        for batch in skip_first_batches(job.batches, skip) if skip else job.batches:
            with job.accelerator.accumulate(job.model):
                loss = loss_of(job.model, batch)
                job.accelerator.backward(loss)
                job.optimizer.step()
                job.optimizer.zero_grad()
            job.losses.append(loss.item())
            levels.append(dict(binding.driver.levels) if binding.driver is not None else {})
            step += 1
            if step == until:
                break
    return levels


def adapting(folder: Path, kind: Kind, controller: str) -> Facts:
    kept = Kept()
    job = job_of(kind, CONTROLLERS[controller], trackers=[kept], record=folder / "run")
    levels = go(job, NUM_STEPS)
    facts = {"levels": levels, "print": fingerprint(job.model), "losses": job.losses, "steps": job.sync.step_index}
    facts["searches"] = controller == "gravac"  # for longer than this run
    if job.accelerator.is_main_process:
        facts |= {"record": read_record(folder / "run"), "logged": kept.logged, "configuration": kept.configuration}
    return facts


@scenarios(
    adapting, kind=KINDS, controller=tuple(CONTROLLERS), slow=all_but(kind="ddp", controller=("accordion", "epochs"))
)
def test_controllers_decide_alike_and_tell(facts: list[Facts]) -> None:
    assert facts[0]["levels"] == facts[1]["levels"]
    assert facts[0]["print"] == facts[1]["print"]
    assert facts[0]["steps"] == NUM_STEPS
    assert facts[0]["losses"][-1] < facts[0]["losses"][0]
    assert facts[0]["searches"] or len({tuple(levels.items()) for levels in facts[0]["levels"]}) > 1
    record = facts[0]["record"]
    assert record[0]["kind"] == "start"
    assert (record[0]["step"], record[0]["num_steps"]) == (0, NUM_STEPS)
    assert any(line["kind"] == "switch" for line in record)
    shares = [line["shares"] for line in record if line["kind"] == "levels"]
    assert all(sum(share.values()) == pytest.approx(1) for share in shares)
    logged = facts[0]["logged"]
    assert len(logged) == len(shares)
    assert "lowbit/share/level_0" in logged[0].values
    assert facts[0]["configuration"].keys() == {"lowbit/controller", "lowbit/levels"}
    assert facts[0]["configuration"]["lowbit/levels"] == ", ".join(record[0]["levels"])


def resuming(folder: Path, kind: Kind, controller: str) -> Facts:
    """Uninterrupted, then by new objects from a checkpoint in the middle of a phase and of an epoch."""
    whole = job_of(kind, CONTROLLERS[controller])
    levels = go(whole, 7)
    whole.accelerator.save_state(state_folder(folder))
    levels += go(whole, NUM_STEPS, start=7)
    again = job_of(kind, CONTROLLERS[controller])
    again.accelerator.load_state(state_folder(folder))
    resumed = go(again, NUM_STEPS, start=7)
    return {
        "levels": levels,
        "resumed": {"levels": resumed, "losses": again.losses, "bits": fingerprint(again.model)},
        "rest": {"levels": levels[7:], "losses": whole.losses[7:], "bits": fingerprint(whole.model)},
    }


RESUMABLE = ("accordion", "epochs", "schedule", "guard")  # GraVAC goes by the clock on the wall


@scenarios(resuming, kind=KINDS, controller=RESUMABLE, slow=all_but(kind="fsdp", controller="guard"))
def test_stopped_in_a_phase_and_resumed_is_as_never_stopped(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["resumed"] == rank["rest"]
        assert len({tuple(levels.items()) for levels in rank["levels"]}) > 1


PHASES = Schedule([Phase(compressor=EIGHT, unit="epoch"), Phase(compressor=TWO, start=2, unit="epoch")])


def epochs(folder: Path) -> Facts:
    """The step at which the third epoch begins, by whatever source gives it."""

    def first(levels: list[dict[str, int]]) -> int:
        return [max(each.values(), default=0) for each in levels].index(1)

    def listed(**options: Any) -> Job:
        job = job_of("ddp", PHASES, **options)
        job.batches = list(job.batches)  # what the loop goes through is no data loader
        return job

    def set_by_loop() -> list[dict[str, int]]:
        job, levels = listed(), []
        binding = binding_of(job.accelerator)
        assert binding is not None
        for epoch in range(3):
            binding.epoch = epoch
            for batch in job.batches:
                job.accelerator.backward(loss_of(job.model, batch))
                job.optimizer.step()
                job.optimizer.zero_grad()
                assert binding.driver is not None
                levels.append(dict(binding.driver.levels))
        return levels

    boundary = job_of("ddp", PHASES)
    go(boundary, 2 * EPOCH)
    boundary.accelerator.save_state(state_folder(folder))
    after = job_of("ddp", PHASES)
    after.accelerator.load_state(state_folder(folder))
    return {
        "counted": first(go(job_of("ddp", PHASES), 3 * EPOCH)),
        "accumulated": first(go(job_of("ddp", PHASES, accumulate=2), 3 * EPOCH)),
        "given": first(go(listed(steps_per_epoch=3), 3 * EPOCH)),
        "set": first(set_by_loop()),
        "resumed": first(go(after, 3 * EPOCH, start=2 * EPOCH)),
        "unknown": raised(lambda: go(listed(), 1)),
        "fraction": raised(lambda: go(job_of("ddp", CONTROLLERS["schedule"], num_steps=None), 1)),
    }


@scenarios(epochs)
def test_what_epoch_it_is(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["counted"] == rank["set"] == 2 * EPOCH
        assert rank["accumulated"] == 2 * EPOCH  # a step begins with its first batch
        assert rank["given"] == 2 * 3
        assert rank["resumed"] == 0
        assert "count in steps" in rank["unknown"]
        assert "accelerator.lowbit.epoch" in rank["unknown"]
        assert "give num_steps" in rank["fraction"]


def falling_rate(folder: Path, kind: Kind) -> Facts:
    job = job_of(kind, Accordion(light=EIGHT, heavy=TWO, interval=2, unit="steps", eta=100.0))
    levels = go(job, 6)
    for group in job.optimizer.param_groups:
        group["lr"] *= 0.1
    return {"levels": [max(each.values()) for each in levels + go(job, 7, start=6)], "rates": job.sync.step_index}


@scenarios(falling_rate, kind=KINDS, slow=all_but(kind="ddp"))
def test_light_at_once_when_the_learning_rate_falls(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["levels"][-2:] == [1, 0]


def monitoring(folder: Path, kind: Kind) -> Facts:
    kept = Kept()
    accelerator = make(
        kind,
        LowBitPlugin(FOUR, monitor=MonitorOptions(every_n_steps=4, bounds=Bounds(max_error=1e-3, patience=2)), seed=3),
        log_with=[kept, "tensorboard"],
        project_dir=str(folder),
    )
    accelerator.init_trackers("run", config={"lr": 0.1})
    job = prepared(accelerator)
    plain = prepared(make(kind, LowBitPlugin(FOUR, seed=3)))
    go(job, 12)
    go(plain, 12)
    facts = {"sent": job.sync.ranks.peers.sent_nbytes, "plain": plain.sync.ranks.peers.sent_nbytes}
    facts |= {"losses": job.losses, "plain losses": plain.losses}
    facts["account"] = sum(map(job.sync.state.sent_nbytes, job.sync.specs))
    if accelerator.is_main_process:
        facts |= {"logged": kept.logged, "record": read_record(folder), "tb": [p.name for p in folder.glob("run/*")]}
        facts |= {"configuration": kept.configuration, "board": next(folder.rglob("hparams.yml")).read_text()}
    return facts


@scenarios(monitoring, kind=KINDS, slow=all_but(kind="ddp"))
def test_figures_reach_every_tracker_and_the_record(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["losses"] == rank["plain losses"]  # to be watched changes nothing
        assert rank["sent"] > rank["plain"]  # what the ranks send each other for it is counted
    lead = facts[0]
    assert [entry.step for entry in lead["logged"]] == [0, 4, 8]
    figures = lead["logged"][-1].values
    assert 0.01 < figures["lowbit/relative_error"] < 0.5
    assert figures["lowbit/wire_nbytes"] == pytest.approx(lead["account"], rel=0.02)  # headers
    assert any("blocks.N" in name for name in figures)
    assert any(name.startswith("events") for name in lead["tb"])
    ours = {"lowbit/compressor": "loco(bits=4, block_size=32)", "lowbit/seed": "3"}
    assert lead["configuration"] == {"lr": 0.1} | ours
    assert "lowbit/compressor: loco(bits=4, block_size=32)" in lead["board"]
    kinds = [line["kind"] for line in lead["record"]]
    assert kinds == ["start", "observation", "observation", *["warning"] * kinds.count("warning"), "observation"]
    assert kinds.count("warning") >= 1
    observed = [line["loss"] for line in lead["record"] if line["kind"] == "observation"]
    assert observed == pytest.approx([lead["losses"][step] for step in (0, 4, 8)])


def growing_batches(folder: Path, kind: Kind) -> Facts:
    controller = AccordionBatch(small=1, large=2, interval=2, unit="steps", eta=100.0)

    def loop(job: Job, until: int) -> None:
        for _ in range(until):
            for batch in job.batches:
                with job.accelerator.accumulate(job.model):
                    job.accelerator.backward(loss_of(job.model, batch))
                    job.optimizer.step()
                    job.optimizer.zero_grad()

    during: list[float] = []
    job = job_of(kind, controller)
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: during.append(optimizer.param_groups[0]["lr"]))
    loop(job, 4)
    hook.remove()
    job.accelerator.save_state(state_folder(folder))
    again = job_of(kind, controller)
    again.accelerator.load_state(state_folder(folder))
    loop(job, 1)
    loop(again, 1)
    return {
        "during": during,
        "after": job.optimizer.param_groups[0]["lr"],
        "accumulation": again.accelerator.gradient_accumulation_steps,
        "steps": again.sync.step_index,
        "bits": fingerprint(job.model),
        "resumed bits": fingerprint(again.model),
    }


@scenarios(growing_batches, kind=KINDS, slow=all_but(kind="ddp"))
def test_batches_grow_with_the_learning_rate_which_is_put_back(facts: list[Facts]) -> None:
    for rank in facts:
        small = rank["during"].count(1e-3)
        assert rank["during"] == pytest.approx([1e-3] * small + [2e-3] * (len(rank["during"]) - small))
        assert 0 < small < len(rank["during"])
        assert rank["after"] == 1e-3
        assert rank["accumulation"] == 2
        assert rank["steps"] == len(rank["during"]) + 2  # the epoch of four batches after the checkpoint
        assert rank["bits"] == rank["resumed bits"]


def one_was_freed(folder: Path) -> Facts:
    """Of two models one is given up, and a third is prepared beside the other."""
    kept = Kept()
    plugin = LowBitPlugin(FOUR, monitor=MonitorOptions(every_n_steps=1))
    accelerator = make("ddp", plugin, log_with=[kept], project_dir=str(folder))
    accelerator.init_trackers("run")
    first, second = accelerator.prepare(mlp(), mlp())
    accelerator.free_memory()
    del first
    gc.collect()
    third = accelerator.prepare(mlp())
    parameters = [*second.parameters(), *third.parameters()]
    optimizer = accelerator.prepare(torch.optim.SGD(parameters, lr=0.1))
    for _ in range(2):
        accelerator.backward(sum(model(torch.randn(4, 16)).square().mean() for model in (second, third)))
        optimizer.step()
        optimizer.zero_grad()
    return {"names": {name.split("/")[0] for _, values in kept.logged for name in values}}


@scenarios(one_was_freed)
def test_models_that_live_together_have_other_names(facts: list[Facts]) -> None:
    assert facts[0]["names"] == {"lowbit_1", "lowbit_2"}


def two_models(folder: Path) -> Facts:
    kept = Kept()
    plugin = LowBitPlugin(FOUR, controller=CONTROLLERS["accordion"], monitor=MonitorOptions(every_n_steps=2))
    accelerator = make("ddp", plugin, log_with=[kept], project_dir=str(folder))
    accelerator.init_trackers("run")
    torch.manual_seed(0)
    models = [mlp(), mlp()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    first, second, optimizer, other = accelerator.prepare(*models, *optimizers)
    for _ in range(4):
        x = torch.randn(4, 16)
        for model, its in ((first, optimizer), (second, other)):
            accelerator.backward(model(x).square().mean())
            its.step()
            its.zero_grad()
    batch = LowBitPlugin(FOUR, controller=AccordionBatch())
    shared = raised(lambda: make("ddp", batch).prepare(mlp(), mlp()))
    names = {name.split("/")[0] for _, values in kept.logged for name in values}
    return {
        "names": names,
        "shared": shared,
        "records": sorted(str(p.relative_to(folder)) for p in folder.rglob("*.jsonl")),
    }


@scenarios(two_models)
def test_two_models(facts: list[Facts]) -> None:
    assert facts[0]["names"] == {"lowbit", "lowbit_1"}
    assert facts[0]["records"] == ["lowbit.jsonl", "model_1/lowbit.jsonl"]
    for rank in facts:
        assert "which all models of an Accelerator share" in rank["shared"]


def refused(folder: Path) -> Facts:
    def plain_loop(job: Job) -> None:
        for batch in job.batches:
            job.accelerator.backward(loss_of(job.model, batch))

    batch = AccordionBatch(interval=2, unit="steps")
    rank = torch.distributed.get_rank()
    return {
        "accumulate": raised(lambda: plain_loop(job_of("ddp", batch))),
        "different": raised(lambda: job_of("ddp", Static(FOUR if rank == 0 else TWO))),
        "controller": raised(lambda: LowBitPlugin(controller=FOUR)),  # type: ignore[arg-type]
        "monitor": raised(lambda: LowBitPlugin(monitor=50)),  # type: ignore[arg-type]
        "every": raised(lambda: MonitorOptions(every_n_steps=0)),
        "num_steps": raised(lambda: LowBitPlugin(num_steps=0)),
    }


@scenarios(refused)
def test_errors_name_what_to_change(facts: list[Facts]) -> None:
    for rank in facts:
        assert "accelerator.accumulate(model)" in rank["accumulate"]
        assert "rank 1 differs from rank 0 in controller.level.bits: 2 instead of 4" in rank["different"]
        assert "controller must be one of lowbit_strategy.control" in rank["controller"]
        assert "monitor must be MonitorOptions(), true or" in rank["monitor"]
        assert "every_n_steps must be a positive integer" in rank["every"]
        assert "num_steps must be a positive integer" in rank["num_steps"]
