"""The names of observed values in loggers."""

from __future__ import annotations

from collections.abc import Mapping

from lowbit_strategy.telemetry.observe import Observation

_PREFIX = "lowbit"
_PER_GROUP = ("relative_error", "cosine", "residual_norm", "bits_per_element", "wire_nbytes")


def metric_name(what: str, group: str = "") -> str:
    """A metric's name, such as ``lowbit/relative_error/blocks.N.weight``; loggers do not accept asterisks."""
    return "/".join(filter(None, (_PREFIX, what, group.replace("*", "N"))))


def for_model(metrics: Mapping[str, float], number: int) -> dict[str, float]:
    """The metrics of the model with this number; the second model's begin with ``lowbit_1/``."""
    if number == 0:
        return dict(metrics)
    return {f"{_PREFIX}_{number}{name.removeprefix(_PREFIX)}": value for name, value in metrics.items()}


def is_of_group(name: str) -> bool:
    """Whether a metric is for one group of parameters, not for all of them."""
    _, what, *group = name.split("/", 2)
    return bool(group) and what in _PER_GROUP


def observation_metrics(observation: Observation) -> dict[str, float]:
    """An observation's metrics: totals first, then each compressed group."""
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
