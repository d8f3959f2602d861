"""Lightning's learning rate finder, also in the middle of training: the run goes on as if there were none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, LearningRateFinder

from lowbit_strategy import DiLoCo, LocalSGD, LoCo, PostLocalSGD
from lowbit_strategy.control import Phase, Schedule
from lowbit_strategy.lightning import AdaptiveCompression, CompressionMonitor, LowBitDDPStrategy
from testing.processes.scenarios import Facts, all_but, scenarios
from testing.record import read_record
from testing.training.comparing import fingerprint
from testing.training.regression import ByStep, loader, trainer

RULES = {
    "localsgd": LocalSGD(every=5),
    "streaming": DiLoCo(every=6, momentum=0.5, fragments=3, delay=1, mix=0.5),
    "begins locally meanwhile": PostLocalSGD(every=3, synchronous=14),
}


class InTheMiddle(LearningRateFinder):
    """As Lightning's documentation has it: at some epochs."""

    done = False

    def on_fit_start(self, *args: Any) -> None:
        """Not yet."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1 and not self.done:
            self.done = True
            self.lr_find(trainer, pl_module)


def _run(folder: Path, rule: Any, callbacks: list[Callback]) -> tuple[int, list[float]]:
    torch.manual_seed(0)
    model = ByStep()
    strategy = LowBitDDPStrategy(LoCo(block_size=32), outer=rule)
    trainer(strategy, max_steps=24, callbacks=callbacks, default_root_dir=str(folder)).fit(model, loader())
    return fingerprint(model), model.losses


def finder(folder: Path, rule: str) -> Facts:
    tried = 4
    finds = InTheMiddle(num_training_steps=tried, update_attr=False, early_stop_threshold=None)
    (without, losses), (found, with_finder) = (_run(folder, RULES[rule], each) for each in ([], [finds]))
    del with_finder[12 : 12 + tried]
    return {"same": (found, with_finder) == (without, losses), "bits": found}


@scenarios(finder, rule=tuple(RULES), slow=all_but(rule=("localsgd", "streaming")))
def test_a_run_goes_on_as_if_nothing_had_been_tried(facts: list[Facts]) -> None:
    assert all(rank["same"] for rank in facts)
    assert facts[0]["bits"] == facts[1]["bits"]


def fractions(folder: Path) -> Facts:
    """The finder trains before callbacks learn that training begins."""
    runs = []
    for finders in ([], [LearningRateFinder(num_training_steps=4, update_attr=False, early_stop_threshold=None)]):
        phases = [Phase(compressor=LoCo(bits=8)), Phase(compressor=LoCo(bits=2), start=0.5, unit="fraction")]
        adaptive = AdaptiveCompression(Schedule(phases))
        runs.append(_run(folder, None, [*finders, adaptive])[0])
        runs.append(adaptive.driver.levels["net.0.weight"])
    return {"runs": runs}


@scenarios(fractions)
def test_phases_in_fractions_are_of_the_run_and_not_of_what_is_tried(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["runs"][:2] == rank["runs"][2:]
        assert rank["runs"][1] == 1


def observed(folder: Path) -> Facts:
    """What a finder tries in the middle is in no record, and the record goes on after it."""
    records = []
    for finders in ([], [InTheMiddle(num_training_steps=4, update_attr=False, early_stop_threshold=None)]):
        monitor = CompressionMonitor(every_n_steps=3, record=folder / str(len(finders)), progress_bar=False)
        _run(folder, None, [*finders, monitor])
        lines = read_record(folder / str(len(finders))) if torch.distributed.get_rank() == 0 else []
        records.append([(line["step"], line["loss"]) for line in lines if line["kind"] == "observation"])
    return {"records": records}


@scenarios(observed)
def test_a_record_goes_on_as_if_nothing_had_been_tried(facts: list[Facts]) -> None:
    without, with_finder = facts[0]["records"]
    assert with_finder == without
    assert [step for step, _ in without] == list(range(0, 24, 3))
