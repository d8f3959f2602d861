"""The pages against the code: messages, packages, pictures and scripts that they name."""

from __future__ import annotations

import ast
import functools
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.pages import blocks
from testing.processes.scripts import REPOSITORY

PACKAGE = REPOSITORY / "lowbit_strategy"
PAGES = sorted(path.name for path in (REPOSITORY / "docs").glob("*.md"))
FILLED_IN = "\0"  # stands for what a message fills in
LOGGED = {"_log.warning", "_log.error", "self._warn", "warnings.warn", "rank_zero_warn"}
DISTINCTIVE = 12  # characters of its own that a phrase needs to stand for messages of which it is only a part


# --- messages --------------------------------------------------------------------------------------------------------


def template(node: ast.expr | None) -> str:
    """A message as the code has it, what is filled in replaced; empty where all of it is."""
    match node:
        case ast.Constant(value=str(text)):
            return re.sub(r"%[sd]", FILLED_IN, text)
        case ast.JoinedStr(values=parts):
            return "".join(template(part) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return template(left) + template(right)
        case _:
            return FILLED_IN


def resolved(node: ast.expr, tree: ast.Module) -> Iterator[ast.expr]:
    """The expression, or what stands behind it: returned by a function, or assigned to a name, of the same file."""
    match node:
        case ast.Call(func=ast.Name(id=name)):
            functions = [part for part in ast.walk(tree) if isinstance(part, ast.FunctionDef) and part.name == name]
            returned = [
                part.value for function in functions for part in ast.walk(function) if isinstance(part, ast.Return)
            ]
            yield from filter(None, returned)
        case ast.Name(id=name):
            for part in ast.walk(tree):
                if isinstance(part, ast.Assign) and any(ast.unparse(target) == name for target in part.targets):
                    yield part.value
        case _:
            yield node


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """The package's files."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def messages() -> Iterator[tuple[str, str]]:
    """Where and what: everything that the package raises or warns of in words of its own."""
    for path, tree in trees().items():
        for node in ast.walk(tree):
            match node:
                case ast.Raise(exc=ast.Call(func=func, args=[first, *_])):
                    if ast.unparse(func) == "_Unfit":
                        continue  # what is wanted, in a few words: a part of "... must be ..., got ..."
                case ast.Call(func=ast.Attribute() | ast.Name() as func, args=[first, *_]):
                    if ast.unparse(func) not in LOGGED:
                        continue
                case _:
                    continue
            for expression in resolved(first, tree):
                text = template(expression)
                if len(text.replace(FILLED_IN, "").strip(" :")) > 1:
                    yield f"{path.relative_to(PACKAGE)}:{node.lineno}", " ".join(text.split())


def phrases(*, own: bool = True) -> list[str]:
    """First cells of the tables on the troubleshooting page; `own`: without those of the frameworks."""
    text = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    text = text.partition("## Messages of the frameworks")[0 if own else 2]
    return re.findall(r"^\| `(.+?)` [^|]*\|", text, re.MULTILINE)


def covers(phrase: str, message: str) -> bool:
    """Whether a message is the one that a phrase of the page stands for; ``...`` is what is filled in."""
    return _longest_part(phrase) in message and _pattern(phrase).search(message) is not None


@functools.cache
def _longest_part(phrase: str) -> str:
    """A search for it comes first: most messages lack it, and it takes far less time than a pattern."""
    return max((" ".join(part.split()) for part in phrase.split("...")), key=len)


@functools.cache
def _pattern(phrase: str) -> re.Pattern[str]:
    parts = [re.escape(" ".join(part.split())) for part in phrase.split("...")]
    if len(phrase.replace("...", "")) < DISTINCTIVE:  # would be part of many: it has to be all of it
        return re.compile(rf"\A{FILLED_IN.join(f' ?{part} ?' for part in parts)}\Z")
    return re.compile(".*?".join(parts))


def test_the_page_has_every_message_and_no_other() -> None:
    found, known = list(messages()), phrases()
    assert len(found) > 200
    missing = [f"{where}  {text}" for where, text in found if not any(covers(phrase, text) for phrase in known)]
    assert not missing, "docs/troubleshooting.md lacks:\n" + "\n".join(missing).replace(FILLED_IN, "...")
    parts = (node for tree in trees().values() for node in ast.walk(tree))
    strings = {template(node) for node in parts if isinstance(node, ast.Constant | ast.JoinedStr)}
    texts = [text for _, text in found] + list(strings)  # some are put together elsewhere
    stale = [phrase for phrase in known if not any(covers(phrase, text) for text in texts)]
    assert not stale, "docs/troubleshooting.md has messages that the package does not raise:\n" + "\n".join(stale)


@pytest.mark.parametrize(
    ("phrase", "message", "expected"),
    [
        ("... must be ..., got ...", f"bits must be 2 to 8, got {FILLED_IN}", True),
        ("rank ... differs from rank 0", f"rank {FILLED_IN} differs from rank 0 in {FILLED_IN}", True),
        ("... needs ...", f"{FILLED_IN} needs {FILLED_IN}", True),
        ("... needs ...", f"a guard needs {FILLED_IN}", False),
        ("another error altogether", "some error altogether", False),
    ],
)
def test_covers(phrase: str, message: str, expected: bool) -> None:
    assert covers(phrase, message) is expected


# --- names of things -------------------------------------------------------------------------------------------------


def test_the_architecture_has_every_package() -> None:
    page = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    folders = [f"`{path.parent.name}/`" for path in PACKAGE.glob("*/__init__.py")]
    modules = [f"`{path.name}`" for path in PACKAGE.glob("*.py") if path.stem != "__init__"]
    assert [name for name in [*folders, *modules] if name not in page] == []


def test_every_picture_is_there_and_drawn_by_a_script() -> None:
    texts = [*map(_text, PAGES), (REPOSITORY / "README.md").read_text(encoding="utf-8")]  # README is the index's text
    shown = {name for text in texts for name in re.findall(r"pictures/(\w+\.svg)", text)}
    pictures = REPOSITORY / "docs" / "pictures"
    assert shown == {path.name for path in pictures.glob("*.svg") if not path.stem.endswith("_narrow")}
    scripts = "\n".join(path.read_text(encoding="utf-8") for path in pictures.glob("*.py"))
    named = {f"{name}.svg" for name in re.findall(r'"(\w+)"', scripts)}
    assert {path.name for path in pictures.glob("*.svg")} <= named | {f"{name[:-4]}_narrow.svg" for name in shown}
    assert shown <= named
    for name in shown:
        ET.parse(pictures / name)


def test_files_that_the_pages_name_exist() -> None:
    """Scripts and modules of the repository, in commands and in text."""
    pages = [_text(page) for page in PAGES] + [
        (REPOSITORY / name).read_text(encoding="utf-8")
        for name in ("README.md", "CONTRIBUTING.md", "benchmarks/LOG.md", "benchmarks/COMPRESSION_STUDY.md")
    ]
    for text in pages:
        for name in re.findall(
            r"\b(?:benchmarks|recipes|tests|docs|lowbit_strategy)/[\w/.-]+\.(?:py|md|yaml|csv)\b", text
        ):
            assert (REPOSITORY / name).is_file(), name
        for module in re.findall(r"python -m ((?:benchmarks|recipes)(?:\.\w+)+)", text):
            assert (REPOSITORY / module.replace(".", "/")).with_suffix(".py").is_file(), module


def test_glossary_defines_each_term_once() -> None:
    terms = re.findall(r"^(\S.*)\n  \S", _text("glossary.md"), re.MULTILINE)
    assert len(terms) > 50
    assert sorted({term.lower() for term in terms}) == sorted(term.lower() for term in terms)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_begin_and_end_where_they_should(page: str) -> None:
    text = _text(page)
    assert text.count("```") == 2 * len(blocks(page))
    assert re.findall(r"^ *```[a-z]* +\S.*$", text, re.MULTILINE) == []  # what follows a fence on its line is not shown


def _text(page: str) -> str:
    return (REPOSITORY / "docs" / page).read_text(encoding="utf-8")


def test_no_address_is_invented() -> None:
    """Links to elsewhere are to what was published, or to specifications."""
    allowed = ("https://keepachangelog.com/", "https://semver.org/", "https://arxiv.org/", "http://10.0.0.")
    allowed += ("https://download.pytorch.org/whl/",)
    for path in [REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md", *Path(REPOSITORY / "docs").glob("*.md")]:
        for address in re.findall(r"https?://[^\s)>]+", path.read_text(encoding="utf-8")):
            assert address.startswith(allowed), f"{path.name}: {address}"
