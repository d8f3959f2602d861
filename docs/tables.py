"""Tables of names and options in the pages, made from the code: ``python docs/tables.py`` puts them where they go.

A page has ``<!-- table: name -->`` before and ``<!-- end of table -->`` after each, Python ``# table: name`` and
``# end of table``. A test fails where one is out of date.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import option_tables
import result_tables

from lowbit_strategy import OUTER_RULES, PRESETS, Compressor
from lowbit_strategy.attach.prepare import Wrapper
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.control import CONTROLLERS
from lowbit_strategy.methods._base.compressor import assign_all
from lowbit_strategy.methods._base.low_rank import LowRankCompressor
from lowbit_strategy.methods.entries import CLASSES
from lowbit_strategy.methods.zoo.composed import Composed
from lowbit_strategy.plan.plan import make_plan
from lowbit_strategy.ranks.topology import Topology
from lowbit_strategy.register import strategy_names

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = (ROOT / "benchmarks" / "ADVICE.md", ROOT / "benchmarks" / "LOG.md")
PACKAGE = ROOT / "lowbit_strategy" / "__init__.py"
PAGES = (ROOT / "README.md", *BENCHMARKS, *sorted((ROOT / "docs").rglob("*.md")), PACKAGE)
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_LINES = re.compile(r"(^ *# table: (\w+)\n).*?(^ *# end of table$)", re.DOTALL | re.MULTILINE)


def filled(text: str) -> str:
    """A page with its tables as the code has them now."""
    text = _LINES.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text)
    return _BLOCK.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", text)


# -- names ------------------------------------------------------------------------------------------------------------


def names() -> str:
    """How many strategy names there are, and of what."""
    ends = ("_ddp", "_fsdp", "_hsdp")
    count = {end: sum(name.endswith(end) for name, *_ in strategy_names()) for end in ends}
    return (
        "Strategy names are `<compressor>_ddp`, `<compressor>_fsdp` and `<compressor>_hsdp` for"
        f" {len(PRESETS)} compressors, `<rule>_ddp` and\n`<rule>_hsdp` for {len(OUTER_RULES)} rules of local steps, and"
        " `lowbit_ddp`, `lowbit_fsdp` and `lowbit_hsdp`,\nwith which the package chooses:"
        f" {count['_ddp']}, {count['_fsdp']} and {count['_hsdp']} names."
    )


def compressor_imports() -> str:
    """Every class of a compressor, for type checkers: at run time names are looked up in the same entries."""
    lines = [target.split(":") for target in CLASSES.values()]
    return "\n".join(f"    from {module} import {name} as {name}" for module, name in sorted(lines))


_KINDS: dict[str, Callable[[Compressor], bool]] = {  # the first that fits
    "Wrappers": lambda compressor: isinstance(compressor, Composed),
    "Sparse methods": lambda compressor: compressor.is_sparse,
    "Low rank": lambda compressor: isinstance(compressor, LowRankCompressor),
    "Quantizers, and none": lambda compressor: True,
}


def compressor_classes() -> str:
    """The reference of every class of a compressor."""
    found: dict[str, list[str]] = {kind: [] for kind in _KINDS}
    for preset in sorted({type(each): each for each in PRESETS.values()}.values(), key=lambda each: each.name):
        kind = next(kind for kind, fits in _KINDS.items() if fits(preset))
        found[kind].append(f".. autoclass:: lowbit_strategy.{type(preset).__name__}")
    parts = ["\n".join((f"## {kind}\n", "```{eval-rst}", *lines, "```")) for kind, lines in found.items()]
    return "\n\n".join(reversed(parts))


def controller_classes() -> str:
    """The reference of every controller, with the ways to make one."""
    lines = ["```{eval-rst}"]
    for cls in sorted(CONTROLLERS.values(), key=lambda each: each.__name__):
        lines.append(f".. autoclass:: lowbit_strategy.control.{cls.__name__}")
        if made := [name for name, value in vars(cls).items() if isinstance(value, classmethod | staticmethod)]:
            lines.append(f"   :members: {', '.join(made)}")
    return "\n".join([*lines, "```"])


def compressor_names() -> str:
    """All names in one sentence."""
    return (
        ", ".join(f"`{name}`" for name in sorted(PRESETS))
        + ".\n\nLocal steps: "
        + ", ".join(f"`{name}`" for name in sorted(OUTER_RULES))
    )


# -- messages ---------------------------------------------------------------------------------------------------------

_FOUR = Topology(4, far=True)
_WEIGHT_AND_BIAS = (TensorSpec("weight", (512, 512)), TensorSpec("bias", (512,)))  # one is compressed, one is exempt


def _in_series(compressor: Compressor, wrapper: Wrapper) -> int:
    specs = list(_WEIGHT_AND_BIAS)
    return make_plan(specs, assign_all(compressor, specs), _FOUR, wrapper).in_series + (wrapper == "fsdp")


def messages_in_series() -> str:
    """Compressors by how many messages of a step wait for each other, and what those wait at 100 ms."""
    found: dict[tuple[int, int], list[str]] = {}
    for name, compressor in PRESETS.items():
        found.setdefault((_in_series(compressor, "ddp"), _in_series(compressor, "fsdp")), []).append(f"`{name}`")
    rows = [
        f"| {', '.join(members)} | {ddp} | {fsdp} | {50 * ddp}, {50 * fsdp} |"
        for (ddp, fsdp), members in sorted(found.items())
    ]
    return "\n".join(("| | DDP | FSDP2, with weights | ms at a round trip of 100 |", "|---|---|---|---|", *rows))


# -- rows of zeros ----------------------------------------------------------------------------------------------------

_LATE = 10_000  # steps: warm-ups are over
_MATRIX, _EMBEDDING = TensorSpec("matrix", (512, 500)), TensorSpec("embedding", (512, 500), "embedding")


def rows_of_zeros() -> str:
    """Compressors by whether rows that never have a gradient stay exactly as they are."""
    found: dict[str, list[str]] = {"all": [], "of embeddings and output heads": [], "none": []}
    for name, compressor in PRESETS.items():
        kept = [
            all(map(compressor.phase(_LATE).assign(spec).method.keeps_zero_rows, (spec, replace(spec, sharded=True))))
            for spec in (_MATRIX, _EMBEDDING)
        ]
        found["all" if all(kept) else "of embeddings and output heads" if kept[1] else "none"].append(f"`{name}`")
    rows = [f"| {which} | {', '.join(names)} |" for which, names in found.items()]
    return "\n".join(("| rows of zeros that stay zeros | compressors |", "|---|---|", *rows))


TABLES: dict[str, Callable[[], str]] = {
    made.__name__: made
    for made in (
        option_tables.compressor_options,
        option_tables.controller_options,
        option_tables.monitor_options,
        option_tables.outer_options,
        option_tables.section_keys,
        option_tables.strategy_options,
        option_tables.weights_options,
        compressor_classes,
        compressor_imports,
        compressor_names,
        controller_classes,
        messages_in_series,
        names,
        rows_of_zeros,
        result_tables.compiled_kernels,
        result_tables.module_operations,
        result_tables.predicted_steps,
    )
}

if __name__ == "__main__":
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        if (after := filled(before)) != before:
            page.write_text(after, encoding="utf-8")
            print(page.relative_to(ROOT))
