"""Loads optional parts by name when they are needed. Nothing else imports them, so each can be deleted."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

PACKAGE = __name__.partition(".")[0]

_OFFERED = {  # by parts, in `lowbit_strategy` itself
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
    """The part that an option of `SyncOptions` needs.

    Args:
        target: ``module:name`` that makes an `attach.part.Part` from the options.
        unasked: What it does if the user does not ask for it; empty: nothing.
    """

    target: str
    unasked: str = ""


OPTIONS = {
    "max_residual": NeededBy("lowbit_strategy.residual_rules.bounded:MaxResidual"),
    "follows_rate": NeededBy("lowbit_strategy.residual_rules.followed_rates:FollowsRate"),
    "check_digest": NeededBy(
        "lowbit_strategy.divergence.comparison:DivergenceCheck", "comparing parameters over ranks"
    ),
    "far_links": NeededBy(
        "lowbit_strategy.far_links.option:FarLinksOption", "another transport where ranks are far apart, on CPUs"
    ),
    "intra": NeededBy("lowbit_strategy.node_codes.option:NodeCodesOption"),
    "memory": NeededBy("lowbit_strategy.fitting.fit:MemoryLimit", "fitting residuals and weights to a GPU's memory"),
    "second_moment": NeededBy(
        "lowbit_strategy.second_moment.option:SecondMomentOption", "correcting Adam's second moment for few bits"
    ),
}


def load(target: str, asked_for: str) -> Any:
    """Import the object that `target` names.

    Args:
        target: ``module:name``, of this package.
        asked_for: What needs it, in the user's words.

    Raises:
        MissingPart: The module is not installed.
    """
    module, _, name = target.partition(":")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing.partition(".")[0] != PACKAGE:
            raise
        raise _missing(missing, asked_for) from None


def need(target: str, asked_for: str) -> None:
    """Raises:
    MissingPart: The object that `target` names is not installed.
    """
    if not is_present(target):
        raise _missing(_folder(target), asked_for)


def _missing(part: str, asked_for: str) -> MissingPart:
    return MissingPart(f"{asked_for} needs {part}, which this installation lacks: reinstall lowbit-strategy", name=part)


def undone(option: str) -> str:
    """The warning if the part for `option` is not installed, and the user has not asked for it."""
    part = OPTIONS[option]
    return goes_without(part.target, f"{part.unasked} ({option})")


def goes_without(target: str, what: str) -> str:
    """The warning that `what` is not done because `target` is not installed."""
    return f"{_folder(target)} is missing, so this run goes without {what}: reinstall lowbit-strategy"


def _folder(target: str) -> str:
    """The first package in the path of `target` that may be missing."""
    return ".".join(target.partition(":")[0].split(".")[:2])


def is_present(target: str) -> bool:
    """Whether the file of `target` exists."""
    try:
        return find_spec(target.partition(":")[0]) is not None
    except ModuleNotFoundError:  # its folder is not
        return False
