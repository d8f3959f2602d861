"""What this package relies on in other packages beyond their documented interface, as data.

Each framework's adapter has a file ``patches.py`` with its table; a test resolves every name against the installed
version, so that an upgrade that moves one fails there, with the reason why it matters.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import Literal, get_args

Use = Literal["wrapped", "overridden", "called", "read", "set"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrivateName:
    """One name of another package.

    Args:
        target: ``module:Class.attribute`` or ``module:name``.
        use: ``wrapped``: replaced on a class, an instance or a module by a function that calls it; ``overridden`` in a
            subclass; ``called``; ``read``; ``set``.
        parameters: Names of a function's parameters that callers pass or an override receives, in order; others may
            follow. None: it is no function.
        seen: Versions of the package it was seen in.
        reason: Why the documented interface is not enough.
    """

    target: str
    use: Use
    parameters: tuple[str, ...] | None = None
    seen: str
    reason: str

    def problem(self) -> str | None:
        """What is wrong with it in the installed version; None: nothing."""
        module, _, path = self.target.partition(":")
        owner_path, _, name = path.rpartition(".")
        try:
            namespace = import_module(module)
            owner = attrgetter(owner_path)(namespace) if owner_path else namespace
        except (ImportError, AttributeError) as error:
            return f"{self.target} is gone ({error}); it is {self.use} because {self.reason}"
        if not hasattr(owner, name):
            if self.parameters is None and _is_set_on_instances(owner, name):
                return None
            return f"{self.target} is gone; it is {self.use} because {self.reason}"
        if self.parameters is None:
            return None
        found = tuple(inspect.signature(getattr(owner, name)).parameters)
        if found[: len(self.parameters)] != self.parameters:
            return f"{self.target} takes {found} instead of {self.parameters}; it is {self.use} because {self.reason}"
        return None


def private_names(seen: str, table: str) -> tuple[PrivateName, ...]:
    """Names of one package, from a table: a line for each reason, and below it one for each name that it is given for.

    A name's line is indented and has the use, the target and, of a function, the parameters in parentheses.
    """
    names: list[PrivateName] = []
    reason = ""
    for line in textwrap.dedent(table).strip().splitlines():
        if not line.startswith(" "):
            reason = " ".join(line.split())
            continue
        use, name = line.split(maxsplit=1)
        assert use in get_args(Use), line
        target, parenthesis, inside = name.rstrip(")").partition("(")
        parameters = tuple(inside.replace(",", " ").split()) if parenthesis else None
        names.append(PrivateName(target=target, use=use, parameters=parameters, seen=seen, reason=reason))  # type: ignore[arg-type]
    return tuple(names)


def _is_set_on_instances(owner: object, name: str) -> bool:
    """Whether a class gives its instances an attribute of this name."""
    if not inspect.isclass(owner):
        return False
    classes = [base for base in owner.__mro__ if base is not object and base.__module__ != "builtins"]
    return any(f"self.{name}" in _source(base) or name in getattr(base, "__annotations__", {}) for base in classes)


@functools.cache  # finding a class in its file takes a tenth of a second
def _source(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return ""


def problems(names: Sequence[PrivateName]) -> list[str]:
    """One sentence for each entry that the installed versions do not have as expected."""
    return [text for name in names if (text := name.problem()) is not None]
