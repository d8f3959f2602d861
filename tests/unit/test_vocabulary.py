"""One word for one thing: names that were replaced do not come back, in code, tests or documentation."""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
TEXT = {".py", ".md", ".jsonl", ".toml", ".c", ".h", ".cfg", ".yml", ".yaml", ".j2", ".css", ".txt", ""}
SELF = "tests/unit/test_vocabulary.py"
VECTORS = ("lowbit_strategy/kernels/native/", "docs/kernels.md")  # C code and a GPU have vector registers with lanes
ALIASES = (  # old names of options, which still work with a warning
    "CHANGELOG.md",
    "lowbit_strategy/methods/_base/compressor.py",
    "lowbit_strategy/methods/quantization/loco.py",
    "tests/unit/options/test_configuration.py",
)


class Word(NamedTuple):
    """A word that is not used.

    Attributes:
        pattern: Where it is found; a group, if there is one, has to have matched.
        instead: What to write.
        within: Beginnings of the paths that are searched; empty: all.
        allowed: Beginnings of the paths that may have it.
    """

    pattern: str
    instead: str
    within: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()


TEXTS = (
    Word(r"(?i)\b(un)?(?P<found>said|told|heard)\b", "sent, compensated, reported or logged"),
    Word(r"\b(?P<found>to say)\b|\b(?P<call>say_)", "to send"),
    Word(r"(?P<found>\blanes?\b|\bLanes?\b|LanePair|CodecLane)", "StatefulCodec, CodecPair or thread", (), VECTORS),
    Word(r"(?i)\b(?P<found>way back|hop back|there and back)\b", "downlink; or encoded and decoded"),
    Word(r"(?i)\b(?P<found>ow(ed|es|ing))\b", "carryover, residual"),
    Word(
        r"(?i)\b(?P<found>settle[sd]?|settling)\b",  # elsewhere figures may settle, as in GraVAC
        "carryover",
        tuple(f"lowbit_strategy/{room}/" for room in ("engine", "methods", "collectives", "checkpoint", "kernels")),
    ),
    Word(r"(?i)(?P<found>milder)", "high_precision", (), ALIASES),
    Word(r"\b(?P<found>Clock|Steering|SteeredModel|Watch|Tap|Kit|\w+Watch)\b", "a name that says what it is"),
    Word(
        r"(?i)\b(?:compression|residual|to|unit)[\s#>*|_-]+gains?\b|\b(?P<found>gains?)\b",
        "residual_gain, sent_energy_ratio or compression_gain",
    ),
    Word(
        r"(?i)(?P<found>(fitted|even|reconstruction|quantisation|ternary|uniform) levels)",
        "codebook, values",
        (),
        ALIASES,
    ),
    Word(
        r"\b(?P<found>(bits?|bytes|MB|elements|seconds|ms)\s+an?\s+"
        r"(rank|step|parameter|hop|worker|byte|bucket|block|tensor|process|second|element\s+(and|a)\s+hop))\b",
        "per",
    ),
    Word(r"\b(?P<found>one\s+\w+\s+an?\s+(block|byte|row|rank|step|element|parameter|tensor|hop))\b", "per"),
)

NAMES = (  # parts of identifiers between underscores
    Word("said|told|heard|unsaid|untold|say", "sent, compensated"),
    Word("lane|lanes", "codec, thread"),
    Word("owed|owes|owing", "carryover"),
    Word("milder", "high_precision", (), ALIASES),
)
WHOLE_NAMES = (
    Word("there|back", "uplink, downlink, or what it holds"),
    Word("gain|gains", "residual_gain, sent_energy_ratio or compression_gain"),
    Word("Step|Steps", "StepContext, step_index, scale"),
    Word("tap|kit|steering", "observer, harness, binding"),
    Word(
        "State", "StateTensors", ("lowbit_strategy/collectives/", "lowbit_strategy/methods/")
    ),  # State: a controller's
    Word("levels?|num_levels", "codebook, values", ("lowbit_strategy/kernels/", "lowbit_strategy/codecs/")),
)
STEMS = [
    "written",
    "saved",
    "endings",
    "questions",
    "specs",
    "shard",
    "loop",
    "tails",
    "common",
    "shared",
    "partitions",
]


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout: no list of the project's files")
    return [name for name in listed.stdout.split("\0") if Path(name).suffix in TEXT and name != SELF]


def applies(word: Word, path: str) -> bool:
    return (not word.within or path.startswith(word.within)) and not path.startswith(word.allowed or ("\0",))


def names_of(text: str) -> list[tuple[int, str]]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [(token.start[0], token.string) for token in tokens if token.type == tokenize.NAME]


def left(path: str, text: str) -> list[str]:
    """Where words that were replaced are found, and what to write instead."""
    found = []
    for word in (word for word in TEXTS if applies(word, path)):
        for match in re.finditer(word.pattern, text):
            if any(match.groupdict().values()):
                line = text.count("\n", 0, match.start()) + 1
                found.append(f"{path}:{line}  {match[0]!r}: write {word.instead}")
    for line, name in names_of(text) if path.endswith(".py") else ():
        parts = name.strip("_").split("_")
        for words, candidates in ((NAMES, parts), (WHOLE_NAMES, [name])):
            for word in (word for word in words if applies(word, path)):
                if any(re.fullmatch(word.pattern, each) for each in candidates):
                    found.append(f"{path}:{line}  name {name!r}: use {word.instead}")
    if Path(path).stem.strip("_") in STEMS:
        found.append(f"{path}  a file name that does not say what is in it")
    return found


def test_no_replaced_word_is_left() -> None:
    found = []
    for path in tracked():
        file = ROOT / path
        if file.is_file():
            found += left(path, file.read_text())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("docs/a.md", "What was said is what the others decode."),
        ("docs/a.md", "The general\nlane does what the kernel does."),
        ("docs/a.md", "Two bits on the way back."),
        ("docs/a.md", "The old method owes a residual."),
        ("docs/a.md", "Embeddings go at milder bits."),
        ("docs/a.md", "A heavier candidate needs a gain above epsilon."),
        ("docs/a.md", "Two bits with fitted levels."),
        ("docs/a.md", "One bit a parameter."),
        ("lowbit_strategy/engine/a.py", "def settle():\n    pass\n"),
        ("lowbit_strategy/kernels/a.py", "num_levels = 3\n"),
        ("lowbit_strategy/a.py", "back = decode(wire)\n"),
        ("lowbit_strategy/a.py", "class Watch:\n    pass\n"),
        ("lowbit_strategy/a.py", "say_all = what_was_told = 1\n"),
        ("lowbit_strategy/a.py", "gain = 1.0\n"),
        ("lowbit_strategy/kernels/triton/common.py", ""),
    ],
)
def test_a_planted_word_is_found(path: str, text: str) -> None:
    assert left(path, text)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("docs/a.md", "There is no way around it: the report says so, and each rank gets its own back."),
        (
            "docs/a.md",
            "The compression\ngain is high; on NVLink there is nothing to gain. The controller's levels are in order.",
        ),
        ("docs/a.md", "A residual that settles; steps per second; a byte per parameter."),
        ("docs/kernels.md", "Sixteen lanes of a vector register."),
        ("lowbit_strategy/a.py", "fed_back = compression_gain = levels = {}\n"),
    ],
)
def test_plain_english_is_left_alone(path: str, text: str) -> None:
    assert not left(path, text)
