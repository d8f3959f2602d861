"""How observations and a controller's choices are written: as metrics for loggers, as fields of the run's record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowbit_strategy.control.base import Controller
from lowbit_strategy.control.levels import describe, labels
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.model.handshake import to_plain
from lowbit_strategy.telemetry.adaptive_driver import AdaptiveDriver
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
    values |= {
        "wire_nbytes": observation.sent_nbytes,
        "codec_ms": observation.codec_ms,
        "comm_ms": observation.comm_ms,
    }
    if observation.inside_nbytes:
        values |= {
            "between_nodes_nbytes": observation.between_nbytes,
            "inside_node_nbytes": observation.inside_nbytes,
        }
    if observation.drift is not None:
        values["drift"] = observation.drift
    metrics = {metric_name(what): value for what, value in values.items()}
    for group, figures in observation.groups.items():
        if figures.compressed:
            metrics |= {metric_name(what, group): getattr(figures, what) for what in _PER_GROUP}
    return metrics


def level_metrics(driver: AdaptiveDriver) -> dict[str, float]:
    """The share of all elements that each of a controller's levels has."""
    return {metric_name("share", f"level_{at}"): share for at, share in enumerate(shares(driver).values())}


def shares(driver: AdaptiveDriver) -> dict[str, float]:
    """Share of all elements by the level's label, as the controller has it in force."""
    specs, numels = driver.sync.specs, dict.fromkeys(driver.labels, 0)
    for name, level in driver.levels.items():
        numels[driver.labels[level]] += specs[name].numel
    total = sum(numels.values()) or 1
    return {label: numel / total for label, numel in numels.items()}


# -- fields of the record ---------------------------------------------------------------------------------------------


def start_fields(sync: GradientSync, every_n_steps: int, controller: Controller | None = None) -> dict[str, Any]:
    """How a run is configured, for the first line of its record."""
    chooses = sync.compressor if controller is None else controller
    return {
        "world_size": sync.ranks.world_size,
        "layout": "reduce-scatter" if sync.scatter else "all-reduce",
        "ranks": describe_ranks(sync.ranks.shape),
        "every_n_steps": every_n_steps,
        "compressor": describe(sync.compressor) if controller is None else None,
        "controller": None if controller is None else type(controller).__name__,
        "levels": None if controller is None else list(labels(controller.levels)),
        "configuration": to_plain("compressor" if controller is None else "controller", chooses),
    }


def level_fields(driver: AdaptiveDriver) -> dict[str, Any]:
    """The levels in force."""
    return {
        "labels": list(driver.labels),
        "shares": shares(driver),
        "parameters": dict(driver.levels),
        "accumulation": driver.accumulation,
    }
