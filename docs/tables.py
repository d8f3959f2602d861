"""Tables of names and options in the pages, made from the code: ``python docs/tables.py`` puts them where they go.

A page has ``<!-- table: name -->`` before and ``<!-- end of table -->`` after each, Python ``# table: name`` and
``# end of table``. A test fails where one is out of date.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lowbit_strategy import OUTER_RULES, PRESETS, Compressor
from lowbit_strategy.accelerate import LowBitPlugin, MonitorOptions
from lowbit_strategy.attach.prepare import Layout
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.control import CONTROLLERS, Bounds
from lowbit_strategy.custom_loop import SyncOptions
from lowbit_strategy.lightning import LowBitDDPStrategy, LowBitFSDPStrategy
from lowbit_strategy.local_steps.interval import AdaComm, Quadratic, Seconds, Stepwise
from lowbit_strategy.local_steps.rule import OuterRule
from lowbit_strategy.methods._base.compressor import assign_all
from lowbit_strategy.methods._base.low_rank import LowRankCompressor
from lowbit_strategy.methods.entries import CLASSES
from lowbit_strategy.methods.weight_codings import WEIGHTS
from lowbit_strategy.methods.zoo.composed import Composed
from lowbit_strategy.options.conversion import describe_type, types_of
from lowbit_strategy.plan.plan import make_plan
from lowbit_strategy.ranks.ranks import Topology
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


# -- options ----------------------------------------------------------------------------------------------------------


_ARGS = re.compile(r"^( *)Args:\n(.*?)(?=^ *\w[\w ]*:\n|\Z)", re.MULTILINE | re.DOTALL)
_ARGUMENT = re.compile(r"^    ([\w, ]+): (.*?)(?=^    \S|\Z)", re.MULTILINE | re.DOTALL)


def arguments(cls: type) -> dict[str, str]:
    """Names in the ``Args`` of a class's docstring, and the text of each, in one line.

    Empty under ``python -OO``, which has no docstrings.
    """
    found = _ARGS.search(f"{inspect.getdoc(cls) or ''}\n")
    if found is None:
        return {}
    pairs = _ARGUMENT.findall(found[2])
    return {name.strip(): " ".join(text.split()) for names, text in pairs for name in names.split(",")}


_REFERS = re.compile(r"See `(\w+)`[.;]? *")
_CODE_FORMS = re.compile(
    r"an instance of \w+ or | or an instance of \w+| or a function|one of lowbit_strategy\.control or "
    r"|\b[A-Z]\w*\([^)]*\), "
)
_NAMED = {
    cls.__name__: cls
    for cls in (OuterRule, *map(type, (*PRESETS.values(), *OUTER_RULES.values())), *CONTROLLERS.values())
    if isinstance(cls, type)
}


def _texts_of(cls: type) -> dict[str, str]:
    """What docstrings say of a class's options, its bases' and those of classes that they refer to included."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        texts |= {name: _followed(name, text) for name, text in arguments(base).items()}
    return texts


def _followed(name: str, text: str) -> str:
    """The text of an option, where it is another class's with that one's words in front."""
    refers = _REFERS.match(text)
    if refers is None or refers[1] not in _NAMED:
        return text
    rest = text[refers.end() :]
    return " ".join(filter(None, [_texts_of(_NAMED[refers[1]])[name], rest[:1].upper() + rest[1:]]))


def _cell(text: str) -> str:
    """A docstring's markup in a table of Markdown."""
    return text.replace("``", "`").replace("|", "\\|")


def _value(kind: Any) -> str:
    """What files can hold of what a field of this type accepts: not the forms of code."""
    text = _CODE_FORMS.sub("", describe_type(kind))
    return re.sub(r"'(\w+)'", r"`\1`", _cell(text))


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "required"
    if isinstance(value, Compressor):
        return _compressor(value)
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(repr(each) for each in value)}]`".replace("'", '"')
    return f"`{value}`"


def _compressor(value: Compressor) -> str:
    """As a file has it: a preset's name, or a mapping of what differs from it."""
    if same := next((name for name, preset in PRESETS.items() if preset == value), None):
        return f"`{same}`"
    name = next(name for name, preset in PRESETS.items() if type(preset) is type(value))
    fields = dataclasses.fields(value)
    differ = {field.name: getattr(value, field.name) for field in fields}
    differ = {key: each for key, each in differ.items() if each != getattr(PRESETS[name], key)}
    return f"`{{compressor: {name}, {', '.join(f'{key}: {_plain(each)}' for key, each in differ.items())}}}`"


def _options(function: Any, *, without: Iterable[str] = ()) -> str:
    """A row per option: name, what a file may give, default, meaning. A class's own come before its bases'."""
    texts = _texts_of(function) if isinstance(function, type) else arguments(function)
    kinds, rows = types_of(function), ["| key | value | default | |", "|---|---|---|---|"]
    own = getattr(function, "__annotations__", {})
    options = sorted(inspect.signature(function).parameters.items(), key=lambda option: option[0] not in own)
    for name, option in options:
        if name in without:
            continue
        default = option.default
        if isinstance(function, type) and dataclasses.is_dataclass(function):
            default = _field_default(function, name)
        rows.append(f"| `{name}` | {_value(kinds[name])} | {_default(default)} | {_cell(texts[name])} |")
    return "\n".join(rows)


def _field_default(cls: Any, name: str) -> Any:
    field = cls.__dataclass_fields__[name]
    if field.default is not dataclasses.MISSING:
        return field.default
    return inspect.Parameter.empty if field.default_factory is dataclasses.MISSING else field.default_factory()


def section_keys() -> str:
    return _options(LowBitPlugin, without=("compressor",))


def strategy_options() -> str:
    """Those of both strategies beside the compressor, and of which they are."""
    of = {"DDP": LowBitDDPStrategy, "FSDP2": LowBitFSDPStrategy}
    names = {name: inspect.signature(cls).parameters for name, cls in of.items()}
    every = [name for name in {**names["DDP"], **names["FSDP2"]} if name not in ("kwargs", "unknown", "compressor")]
    texts = arguments(SyncOptions) | {
        "process_group_backend": "As for `ModelParallelStrategy`.",
        "timeout": "Of all process groups, this package's too.",
    }
    texts = _texts_of(LowBitFSDPStrategy) | texts
    rows = ["| option | of | |", "|---|---|---|"]
    for name in every:
        known = ("FSDP2",) if texts[name].startswith("FSDP2:") else of
        where = [kind for kind in known if name in names[kind]]
        rows.append(f"| `{name}` | {', '.join(where)} | {_cell(texts[name])} |")
    return "\n".join(rows)


def compressor_options() -> str:
    """One table per class, with the presets that are made of it."""
    classes: dict[type, list[str]] = {}
    for name, preset in PRESETS.items():
        classes.setdefault(type(preset), []).append(name)
    common = {field.name for field in dataclasses.fields(Compressor)}
    parts = [f"**Every compressor**\n\n{_options(Compressor)}"]
    for cls, names in classes.items():
        title = ", ".join(f"`{name}`" for name in names)
        if {field.name for field in dataclasses.fields(cls)} == common:  # type: ignore[arg-type]
            parts.append(f"**{title}**: no more options.")
            continue
        changed = _changes(cls, names)
        parts.append(f"**{title}**\n\n{_options(cls, without=common)}{changed}")
    return "\n\n".join(parts)


def _changes(cls: Any, names: list[str]) -> str:
    """What presets set otherwise than the class does."""
    lines = []
    for name in names:
        preset = PRESETS[name]
        other = {
            field.name: getattr(preset, field.name)
            for field in dataclasses.fields(cls)
            if getattr(preset, field.name) != _field_default(cls, field.name)
        }
        if other:
            lines.append(f"`{name}` is " + ", ".join(f"`{key}: {_plain(value)}`" for key, value in other.items()) + ".")
    return "\n\n" + "\n".join(lines) if lines else ""


def _plain(value: Any) -> str:
    return _default(value).strip("`")


def outer_options() -> str:
    parts = []
    for name, rule in OUTER_RULES.items():
        parts.append(f"**`{name}`**\n\n{_with_values(rule)}")
    for cls in (Quadratic, AdaComm, Stepwise, Seconds):
        parts.append(f"**`every: {{name: {cls.__name__.lower()}}}`**\n\n{_options(cls)}")
    return "\n\n".join(parts)


def _with_values(configuration: Any) -> str:
    """As `_options`, with the values of one preset as defaults."""
    cls = type(configuration)
    text = _options(cls)
    for field in dataclasses.fields(cls):
        before, now = _default(_field_default(cls, field.name)), _default(getattr(configuration, field.name))
        text = re.sub(rf"(\| `{field.name}` \|.*?\| ){re.escape(before)} \|", lambda found: f"{found[1]}{now} |", text)  # noqa: B023
    return text


def weights_options() -> str:
    return "\n\n".join(f"**`{name}`**\n\n{_options(cls)}" for name, cls in WEIGHTS.items())


def controller_options() -> str:
    return "\n\n".join(f"**`{name}`**\n\n{_options(made)}" for name, made in sorted(CONTROLLERS.items()))


def monitor_options() -> str:
    return f"**`monitor`**\n\n{_options(MonitorOptions)}\n\n**`bounds`**\n\n{_options(Bounds)}"


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


def _in_series(compressor: Compressor, layout: Layout) -> int:
    specs = list(_WEIGHT_AND_BIAS)
    return make_plan(specs, assign_all(compressor, specs), _FOUR, layout).in_series + (layout == "fsdp")


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


# -- predicted steps --------------------------------------------------------------------------------------------------

_COLUMNS = (("ddp", "fsdp2", "dense_hsdp"), ("fsdp2-bf16",), ("loco_ddp", "loco_fsdp", "loco_hsdp"))
_COLUMNS += (("loco1_ddp", "loco1_fsdp", "loco1_hsdp"), ("diloco_ddp", "diloco_hsdp"))
_LAYOUTS = {"ddp": "DDP", "fsdp": "FSDP2", "hsdp": "HSDP"}
_RATES = {"none": "loopback", "1gbit": "1 Gbit/s", "200mbit": "200 Mbit/s", "50mbit": "50 Mbit/s"}


def _by_link(name: list[str]) -> tuple[int, int, str, str]:
    layout, hosts, rate, delay = name
    return int(delay.removesuffix("ms")), list(_RATES).index(rate), layout, hosts


def predicted_steps() -> str:
    """Every cell of `benchmarks/predicted_steps.py`: predicted over measured seconds."""
    runs = json.loads((ROOT / "benchmarks/results/predicted_steps.json").read_text())["runs"]
    head = "| link | layout, hosts x ranks | float32 | bf16 | 4 bits | 1 bit | DiLoCo |"
    rows, ratios = [], []
    for layout, hosts, rate, delay in sorted(map(str.split, runs), key=_by_link):
        run = runs[f"{layout} {hosts} {rate} {delay}"]
        cells = []
        for variants in _COLUMNS:
            found = [run["cells"][variant] for variant in variants if variant in run["cells"]]
            ratios += [cell["seconds"] / cell["measured_s"] for cell in found]
            cells.append("".join(f"{cell['seconds']:.3g} / {cell['measured_s']:.3g}" for cell in found))
        late = "" if delay == "0ms" else f", {delay.removesuffix('ms')} ms"
        rows.append(f"| {_RATES[rate]}{late} | {_LAYOUTS[layout]}, {hosts} | {' | '.join(cells)} |")
    near = [sum(abs(ratio - 1) <= bound for ratio in ratios) for bound in (0.15, 0.3)]
    every = [cell for run in runs.values() for cell in run["cells"].values()]
    inside = sum(cell["low"] <= cell["measured_s"] <= cell["high"] for cell in every)
    counted = f"Of {len(ratios)} cells {near[0]} are within 15 %, {near[1]} within 30 %, {inside} inside their range."
    return "\n".join((head, "|---|---|---|---|---|---|---|", *rows, "", counted))


# -- compiled kernels -------------------------------------------------------------------------------------------------

_MEASURED = {  # names in `gpu_acceptance_h200.json`
    "loco, 4 bits, bf16": "loco 4bit bfloat16",
    "loco, E2M1, bf16": "loco e2m1 bfloat16",
    "loco, E2M1, float32": "loco e2m1 float32",
    "loco, 8 bits, bf16": "loco 8bit bfloat16",
    "sum of 8, 4 bits": "decode_sum 4bit W=8",
    "sum of 8, E2M1": "decode_sum e2m1 W=8",
    "sum of 8, 8 bits": "decode_sum 8bit W=8",
    "sum of 64, 4 bits": "decode_sum 4bit W=64",
    "sum of 64, E2M1": "decode_sum e2m1 W=64",
    "sum of 64, 8 bits": "decode_sum 8bit W=64",
}


def compiled_kernels() -> str:
    """What the code of each kernel says on three architectures, and what was measured before on one."""
    results = ROOT / "benchmarks/results"
    compiled = json.loads((results / "compiled_kernels.json").read_text())
    earlier = json.loads((results / "gpu_acceptance_h200.json").read_text())
    measured = {row["name"]: f"{row['share_of_copy']:.2f}" for row in earlier["kernels"]}
    rows = []
    for name, archs in compiled["kernels"].items():
        cells = [
            ", ".join(f"{figures[what]:g}" for figures in archs.values())
            for what in ("instructions", "registers", "warps", "wide_share", "share")
        ]
        rows.append(f"| {name} | {' | '.join(cells)} | {measured.get(_MEASURED.get(name, ''), '')} |")
    head = "| kernel | instructions per element | registers | warps | wide accesses | share of a copy | measured |"
    note = (
        f"On sm_80, sm_90, sm_100; Triton {compiled['triton']}. The share is computed for an A100, an H200 and a B200."
        f" Measured on an H200, {earlier['date']}, with earlier kernels."
    )
    return "\n".join((head, "|---|---|---|---|---|---|---|", *rows, "", note))


def module_operations() -> str:
    """Torch's operations of an FSDP2 module in a step, fewest first."""
    found = json.loads((ROOT / "benchmarks/results/gpu_operations.json").read_text())
    operations = dict(found["operations"])
    stock, model = operations["stock"], operations.pop("alone")
    rows = [
        f"| {name} | {each:g} | {each / stock:.2f} | {(each - model) / (stock - model):.1f} |"
        for name, each in sorted(operations.items(), key=lambda item: item[1])
    ]
    head = "| | operations | times stock's | without the model's own |"
    return "\n".join((head, "|---|---|---|---|", *rows, "", f"torch {found['torch']}."))


TABLES: dict[str, Callable[[], str]] = {
    made.__name__: made
    for made in (
        compiled_kernels,
        compressor_classes,
        compressor_imports,
        compressor_names,
        compressor_options,
        controller_classes,
        controller_options,
        messages_in_series,
        module_operations,
        monitor_options,
        names,
        outer_options,
        predicted_steps,
        rows_of_zeros,
        section_keys,
        strategy_options,
        weights_options,
    )
}

if __name__ == "__main__":
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        if (after := filled(before)) != before:
            page.write_text(after, encoding="utf-8")
            print(page.relative_to(ROOT))
