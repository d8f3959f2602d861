"""What options do, written once: the ``Args`` of one configuration filled into the docstrings of all that take them."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_ARGS = re.compile(r"^( *)Args:\n(.*?)(?=^ *\w[\w ]*:\n|\Z)", re.MULTILINE | re.DOTALL)
_ARGUMENT = re.compile(r"^    ([\w, ]+): (.*?)(?=^    \S|\Z)", re.MULTILINE | re.DOTALL)
_WIDTH = 120


def arguments(cls: type) -> dict[str, str]:
    """Names in the ``Args`` of a class's docstring, and the text of each, in one line.

    Empty under ``python -OO``, which has no docstrings.
    """
    found = _ARGS.search(f"{inspect.getdoc(cls) or ''}\n")
    if found is None:
        return {}
    pairs = _ARGUMENT.findall(found[2])
    return {name.strip(): " ".join(text.split()) for names, text in pairs for name in names.split(",")}


def documented_options(source: type) -> Callable[[type[T]], type[T]]:
    """Replace the line of a docstring that begins with ``@`` and the name of `source` by the arguments of `source`.

    Those that the class's constructor does not have are left out, and those that its docstring has already.
    """
    texts = arguments(source)
    marker = re.compile(rf"^( *)@{source.__name__}\b.*\n(?:\1 +\S.*\n)*", re.MULTILINE)

    def fill(cls: type[T]) -> type[T]:
        if cls.__doc__ is None or (found := marker.search(cls.__doc__)) is None:
            return cls
        own, accepted = arguments(cls), inspect.signature(cls).parameters
        margin = (found[1], f"{found[1]}    ")
        entries = [
            textwrap.fill(f"{name}: {text}", _WIDTH, initial_indent=margin[0], subsequent_indent=margin[1]) + "\n"
            for name, text in texts.items()
            if name in accepted and name not in own
        ]
        cls.__doc__ = "".join([cls.__doc__[: found.start()], *entries, cls.__doc__[found.end() :]])
        return cls

    return fill
