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

    def fill(cls: type[T]) -> type[T]:
        if cls.__doc__ is None:
            return cls
        marker = re.compile(rf"^( *)@{source.__name__}\b.*\n(?:\1 +\S.*\n)*", re.MULTILINE)
        own = arguments(cls)
        taken = [name for name in arguments(source) if name in inspect.signature(cls).parameters and name not in own]
        texts = arguments(source)

        def entries(found: re.Match[str]) -> str:
            indents = {"initial_indent": found[1], "subsequent_indent": f"{found[1]}    "}
            lines = [textwrap.fill(f"{name}: {texts[name]}", _WIDTH, **indents) for name in taken]  # type: ignore[arg-type]
            return "".join(f"{line}\n" for line in lines)

        cls.__doc__ = marker.sub(entries, cls.__doc__)
        return cls

    return fill
