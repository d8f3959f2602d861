"""A run's record: one JSON object per line, appended as things happen, so that a running job can be read too."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowbit_strategy.control.base import Controller, describe, labels
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.model.handshake import to_plain
from lowbit_strategy.telemetry.observe import Observation
from lowbit_strategy.telemetry.startup_report import describe_ranks

_PREFIX = "lowbit"
_PER_GROUP = ("relative_error", "cosine", "residual_norm", "bits_per_element", "wire_nbytes")


def metric_name(what: str, group: str = "") -> str:
    """``lowbit/relative_error/blocks.N.weight``: loggers accept no asterisks."""
    return "/".join(filter(None, (_PREFIX, what, group.replace("*", "N"))))


def for_model(metrics: Mapping[str, float], number: int) -> dict[str, float]:
    """The metrics of the model with this number: ``lowbit_1/...`` for the second one."""
    if number == 0:
        return dict(metrics)
    return {f"{_PREFIX}_{number}{name.removeprefix(_PREFIX)}": value for name, value in metrics.items()}


def is_of_group(name: str) -> bool:
    """Whether a metric is about one group of parameters, and not about all of them."""
    _, what, *group = name.split("/", 2)
    return bool(group) and what in _PER_GROUP


# -- metrics ----------------------------------------------------------------------------------------------------------


def observation_metrics(observation: Observation) -> dict[str, float]:
    """An observation: totals first, then each group that is compressed."""
    values: dict[str, float] = {what: getattr(observation.total, what) for what in _PER_GROUP}
    values |= {"wire_nbytes": observation.sent_nbytes, "codec_ms": observation.codec_ms, "comm_ms": observation.comm_ms}
    if observation.inside_nbytes:
        values |= {"between_nodes_nbytes": observation.between_nbytes, "inside_node_nbytes": observation.inside_nbytes}
    if observation.drift is not None:
        values["drift"] = observation.drift
    metrics = {metric_name(what): value for what, value in values.items()}
    for group, figures in observation.groups.items():
        if figures.compressed:
            metrics |= {metric_name(what, group): getattr(figures, what) for what in _PER_GROUP}
    return metrics


# -- fields of the record ---------------------------------------------------------------------------------------------


def start_fields(sync: GradientSync, every_n_steps: int, controller: Controller | None = None) -> dict[str, Any]:
    """How a run is configured, for the first line of its record."""
    chooses = sync.compressor if controller is None else controller
    return {
        "world_size": sync.ranks.world_size,
        "layout": "reduce-scatter" if sync.scatter else "all-reduce",
        "ranks": "; ".join(describe_ranks(ranks.topology) for ranks in sync.all_ranks),
        "every_n_steps": every_n_steps,
        "compressor": describe(sync.compressor) if controller is None else None,
        "controller": None if controller is None else type(controller).__name__,
        "levels": None if controller is None else list(labels(controller.levels)),
        "configuration": to_plain("compressor" if controller is None else "controller", chooses),
    }


FILE_NAME = "lowbit.jsonl"


class RunRecord:
    """Appends to the record of one run; for rank 0, of each replica where they come and go.

    Kinds of lines: ``start`` (also after a resume), ``observation``, ``switch``, ``levels``, ``members`` (of replicas
    that come and go, when they have changed), ``warning``, ``validation``. All have a ``step``: optimizer steps
    completed before.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, kind: str, step: int, **fields: Any) -> None:
        line = {"kind": kind, "step": step, "time": round(time.time(), 3), **fields}
        with self.path.open("a") as file:
            file.write(json.dumps(_plain(line)) + "\n")


def _plain(value: Any) -> Any:
    """JSON has no NaN: what is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
