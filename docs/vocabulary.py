"""One word for one thing: names that were replaced do not come back, in code, tests or documentation.

Part of ``make check``: lists where a word of the tables below is found, and what to write instead.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TEXT = {".py", ".md", ".jsonl", ".toml", ".c", ".h", ".cfg", ".yml", ".yaml", ".j2", ".css", ".txt", ""}
SELF = "docs/vocabulary.py"
VECTORS = ("lowbit_strategy/kernels/native/", "docs/kernels.md")  # C code and a GPU have vector registers with lanes


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
    Word(r"(?i)(?P<found>milder)", "high_precision"),
    Word(r"\b(?P<found>Clock|Steering|SteeredModel|Watch|Tap|Kit|\w+Watch)\b", "a name that says what it is"),
    Word(
        r"(?i)\b(?:compression|residual|to|unit)[\s#>*|_-]+gains?\b|\b(?P<found>gains?)\b",
        "residual_gain, sent_energy_ratio or compression_gain",
    ),
    Word(
        r"(?i)(?P<found>(fitted|even|reconstruction|quantisation|ternary|uniform) levels)",
        "codebook, values",
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
    Word("milder", "high_precision"),
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
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
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


def unexplained() -> list[str]:
    """Suffixes of tensors whose letters the legend in docs/architecture.md lacks."""
    page = (ROOT / "docs/architecture.md").read_text().partition("### Suffixes of tensors")[2].partition("\n#")[0]
    legend = set(re.findall(r"`([A-Z])`", "".join(re.findall(r"^\|.*?\|.*?\|", page, re.MULTILINE))))
    found = []
    for path in (ROOT / "lowbit_strategy").rglob("*.py"):
        for line, name in names_of(path.read_text()):
            suffix = re.fullmatch(r"[a-z]\w*_([A-Z]{1,3})", name)
            if suffix and not set(suffix[1]) <= legend:
                found.append(f"{path.relative_to(ROOT)}:{line}  {name}: explain its suffix in docs/architecture.md")
    return found


def main() -> None:
    """Ends with the list of what is found, and status 1 if there is any."""
    found = unexplained()
    found += [each for path in tracked() if (ROOT / path).is_file() for each in left(path, (ROOT / path).read_text())]
    sys.exit("\n".join(found) or 0)


if __name__ == "__main__":
    main()
