"""The way to parts that nothing else needs: by name, when they are asked for. Each can be deleted."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

PACKAGE = __name__.partition(".")[0]

_OFFERED = {  # by parts, in `lowbit_strategy` itself
    "lowbit_strategy.auto": ("Auto",),
    "lowbit_strategy.elastic": ("Elastic", "ElasticSampler"),
    "lowbit_strategy.local_steps": (
        "AdaComm", "DiLoCo", "EagerDiLoCo", "LocalSGD", "OUTER_RULES", "OuterRule", "OverlapLocalSGD", "PostLocalSGD",
        "Quadratic", "Seconds", "SparseLoCo", "Stepwise", "StreamingDiLoCo", "as_outer",
    ),
}  # fmt: skip
NAMES = {name: f"{part}:{name}" for part, names in _OFFERED.items() for name in names}
RULES = ("diloco", "eagerdiloco", "localsgd", "overlaplocalsgd", "postlocalsgd", "sparseloco", "streamingdiloco")


class MissingPart(ImportError):
    """A part of this package is not there."""


OPTIONS = {  # of `SyncOptions`, and the parts that they need
    "far_links": "lowbit_strategy.far_links",
    "intra": "lowbit_strategy.node_codes",
    "memory": "lowbit_strategy.fitting",
}


def load(target: str, asked_for: str) -> Any:
    """What `target` names.

    Args:
        target: ``module:name``, of this package.
        asked_for: What needs it, as its user calls it.

    Raises:
        MissingPart: The module is not there.
    """
    module, _, name = target.partition(":")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not f"{module}.".startswith(f"{missing}.") or not missing.startswith(PACKAGE):
            raise
        raise _missing(missing, asked_for) from None


def need(part: str, asked_for: str) -> None:
    """Raises:
    MissingPart: `part` is not there.
    """
    if not is_present(part):
        raise _missing(part, asked_for)


def _missing(part: str, asked_for: str) -> MissingPart:
    return MissingPart(f"{asked_for} needs {part}, which this installation lacks: reinstall lowbit-strategy", name=part)


def is_present(target: str) -> bool:
    """Whether the file of `target` is there."""
    try:
        return find_spec(target.partition(":")[0]) is not None
    except ModuleNotFoundError:  # its folder is not
        return False
