"""Writes a run's record: one JSON object per line, appended as things happen, so that a running job can be read too."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lowbit_strategy.adaptation.driver import AdaptiveDriver, Event, shares
from lowbit_strategy.adaptation.model_control import ModelControl
from lowbit_strategy.control.base import Progress, describe, labels
from lowbit_strategy.model.fingerprint import to_plain
from lowbit_strategy.report.record import FILE_NAME
from lowbit_strategy.telemetry.observe import Observation


class RunRecord:
    """Appends to the record of one run; for rank 0, of each replica where they come and go.

    Kinds of lines: ``start`` (also after a resume), ``observation``, ``switch``, ``levels``, ``members`` (of replicas
    that come and go, when they have changed), ``warning``, ``validation``. All have a ``step``: optimizer steps
    completed before.

    Args:
        folder: The record's folder, which is made if it does not exist.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / FILE_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, kind: str, step: int, **fields: Any) -> None:
        line = {"kind": kind, "step": step, "time": round(time.time(), 3), **fields}
        with self.path.open("a") as file:
            file.write(json.dumps(_plain(line)) + "\n")

    def start(self, control: ModelControl, **fields: Any) -> None:
        """Training begins or continues: write the run's configuration, and `fields`."""
        sync, controller = control.sync, None if control.driver is None else control.driver.controller
        configuration = to_plain("compressor", sync.compressor)
        if controller is not None:
            configuration = to_plain("controller", controller)
        self.write(
            "start",
            sync.step_index,
            num_steps=control.progress(sync.step_index).num_steps,
            world_size=sync.ranks.world_size,
            layout="reduce-scatter" if sync.sharded else "all-reduce",
            ranks="; ".join(ranks.topology.label for ranks in sync.all_ranks),
            every_n_steps=0 if control.options is None else control.options.every_n_steps,
            compressor=describe(sync.compressor) if controller is None else None,
            controller=None if controller is None else type(controller).__name__,
            levels=None if controller is None else list(labels(controller.levels)),
            configuration=configuration,
            **fields,
        )

    def observed(self, observation: Observation, progress: Progress, loss: Any, warnings: Sequence[str]) -> None:
        self.write(
            "observation",
            epoch=progress.epoch,
            loss=None if loss is None else float(torch.as_tensor(loss).detach()),
            learning_rate=progress.learning_rate,
            **asdict(observation),
        )
        self._warn(warnings, observation.step)

    def decided(self, driver: AdaptiveDriver, events: Sequence[Event], warnings: Sequence[str], step: int) -> None:
        """A controller has decided something before `step`."""
        for event in events:
            self.write("switch", event.step, epoch=event.epoch, **event.switch._asdict())
        self._warn(warnings, step)
        self.write(
            "levels",
            step,
            labels=list(driver.labels),
            shares=shares(driver),
            parameters=dict(driver.levels),
            accumulation=driver.accumulation,
        )

    def _warn(self, texts: Sequence[str], step: int) -> None:
        for text in texts:
            self.write("warning", step, text=text)


def _plain(value: Any) -> Any:
    """Replace values that are not finite by null, since JSON has no NaN."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
