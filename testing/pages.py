"""What a page of the documentation has for its readers to copy: whole files, commands."""

from __future__ import annotations

import re

from testing.processes.scripts import REPOSITORY

_BLOCK = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)  # Sphinx's too
_FILE = re.compile(r"# ([\w.]+)\n")  # a whole file begins with its name
_PRINTED = re.compile(r"lowbit_strategy: |\| ")  # what a command prints: the start-up report, a drawing


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of every fenced block."""
    return _BLOCK.findall((REPOSITORY / "docs" / page).read_text(encoding="utf-8"))


def files(page: str) -> dict[str, str]:
    found = [(match[1], text) for language, text in blocks(page) if language and (match := _FILE.match(text))]
    assert len(dict(found)) == len(found), f"two files of one name in {page}"
    return dict(found)


def commands(page: str) -> list[str]:
    """Every command, without the comment that may follow it; one that goes on in the next line is one."""
    texts = [text.replace("\\\n", " ") for language, text in blocks(page) if not language and not _PRINTED.match(text)]
    return [line.partition("     #")[0].strip() for text in texts for line in text.splitlines()]
