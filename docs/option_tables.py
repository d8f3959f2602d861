"""Tables of options, made from their docstrings, types and defaults."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable
from typing import Any

from lowbit_strategy import OUTER_RULES, PRESETS, Compressor
from lowbit_strategy.accelerate import LowBitPlugin, MonitorOptions
from lowbit_strategy.control import CONTROLLERS, Bounds
from lowbit_strategy.custom_loop import SyncOptions
from lowbit_strategy.lightning import LowBitDDPStrategy, LowBitFSDPStrategy
from lowbit_strategy.local_steps.interval import AdaComm, Quadratic, Seconds, Stepwise
from lowbit_strategy.local_steps.rule import OuterRule
from lowbit_strategy.methods.weight_codings import WEIGHTS
from lowbit_strategy.options.conversion import describe_type, types_of

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
