"""The way to parts that nothing else needs: by name, when they are asked for. Each can be deleted."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

PACKAGE = __name__.partition(".")[0]

NAMES = {  # of parts, in `lowbit_strategy` itself
    "Elastic": "lowbit_strategy.elastic:Elastic",
    "ElasticSampler": "lowbit_strategy.elastic:ElasticSampler",
}


class MissingPart(ImportError):
    """A part of this package is not there."""


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
        raise MissingPart(
            f"{asked_for} needs {missing}, which this installation lacks: reinstall lowbit-strategy", name=missing
        ) from None


def present() -> list[str]:
    """Those of `NAMES` whose parts are there."""
    return [name for name, target in NAMES.items() if find_spec(target.partition(":")[0]) is not None]
