"""Loads optional parts by name when they are needed. Nothing else imports them, so each can be deleted."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

PACKAGE = __name__.partition(".")[0]

_OFFERED = {  # names that parts add to `lowbit_strategy` itself
    "lowbit_strategy.auto": ("Auto",),
    "lowbit_strategy.divergence": ("DivergenceError",),
    "lowbit_strategy.elastic": ("Elastic", "ElasticSampler"),
    "lowbit_strategy.local_steps": (
        "AdaComm", "DiLoCo", "EagerDiLoCo", "LocalSGD", "OUTER_RULES", "OuterRule", "OverlapLocalSGD", "PostLocalSGD",
        "Quadratic", "Seconds", "SparseLoCo", "Stepwise", "StreamingDiLoCo", "as_outer",
    ),
}  # fmt: skip
NAMES = {name: f"{part}:{name}" for part, names in _OFFERED.items() for name in names}
RULES = ("diloco", "eagerdiloco", "localsgd", "overlaplocalsgd", "postlocalsgd", "sparseloco", "streamingdiloco")


class MissingPart(ImportError):
    """A part of this package is not installed."""


class NeededBy(NamedTuple):
    """The part that an option of `SyncOptions`, or every run, needs.

    Args:
        target: ``module:name`` that makes an `attach.part.Part` from the options.
        unasked: What it does without the user's request; empty: nothing.
    """

    target: str
    unasked: str = ""

    @property
    def warning(self) -> str:
        """The warning that this is not done, because the part is not installed."""
        return f"{missing(self.target)} is missing, so this run goes without {self.unasked}: reinstall lowbit-strategy"


PARTS = {  # by the option that requests the part, if there is one
    "max_residual": NeededBy("lowbit_strategy.residual_rules.bounded:MaxResidual"),
    "follows_rate": NeededBy("lowbit_strategy.residual_rules.followed_rates:FollowsRate"),
    "check_digest": NeededBy(
        "lowbit_strategy.divergence.comparison:DivergenceCheck", "comparing parameters over ranks (check_digest)"
    ),
    "far_links": NeededBy(
        "lowbit_strategy.far_links.far_links_option:FarLinksOption",
        "the transport for ranks that are far apart, on CPUs (far_links)",
    ),
    "intra": NeededBy("lowbit_strategy.node_codes.intra_option:NodeCodesOption"),
    "memory": NeededBy(
        "lowbit_strategy.fitting.fit:MemoryLimit", "fitting residuals and weights to a GPU's memory (memory)"
    ),
    "plan": NeededBy(
        "lowbit_strategy.plan.every_run:PlanPart", "the start-up report and the check of the bytes that it sends"
    ),
    "second_moment": NeededBy(
        "lowbit_strategy.second_moment.second_moment_option:SecondMomentOption",
        "correcting Adam's second moment for few bits (second_moment)",
    ),
}


def load(target: str, asked_for: str) -> Any:
    """Import the object that `target` names.

    Args:
        target: ``module:name``, of this package.
        asked_for: What needs it, in user-facing terms.

    Raises:
        MissingPart: The module, or a part that it needs, is not installed.
    """
    need(target, asked_for)
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def need(target: str, asked_for: str) -> None:
    """Raise a MissingPart if the object that `target` names, or a part that it needs, is not installed."""
    if part := missing(target):
        raise MissingPart(
            f"{asked_for} needs {part}, which this installation lacks: reinstall lowbit-strategy", name=part
        )


def is_present(target: str) -> bool:
    """Whether `target` can be imported."""
    return not missing(target)


def missing(target: str) -> str:
    """The part of this package that keeps `target` from being imported; empty: it can be."""
    try:
        import_module(target.partition(":")[0])
    except ModuleNotFoundError as error:
        part = error.name or ""
        if part.partition(".")[0] != PACKAGE:
            raise
        return part
    return ""
