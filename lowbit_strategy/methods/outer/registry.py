"""Outer rules by name: what strategy names, configuration files and the command line use."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.outer.interval import AdaComm, Interval, Quadratic, Seconds, Stepwise
from lowbit_strategy.methods.outer.published import (
    DiLoCo,
    EagerDiLoCo,
    LocalSGD,
    OverlapLocalSGD,
    PostLocalSGD,
    SparseLoCo,
    StreamingDiLoCo,
)
from lowbit_strategy.methods.outer.rule import OuterRule
from lowbit_strategy.methods.registry import register_other_names
from lowbit_strategy.options.conversion import (
    Conversion,
    Mismatch,
    Source,
    call,
    convert,
    did_you_mean,
    register_conversion,
)

T = TypeVar("T")

OUTER_RULES: dict[str, OuterRule] = {
    "diloco": DiLoCo(),
    "eagerdiloco": EagerDiLoCo(),
    "localsgd": LocalSGD(),
    "overlaplocalsgd": OverlapLocalSGD(),
    "postlocalsgd": PostLocalSGD(),
    "sparseloco": SparseLoCo(),
    "streamingdiloco": StreamingDiLoCo(),
}

register_other_names(OUTER_RULES, "it is an outer rule, outer={0!r} beside a compressor or alone (strategy {0}_ddp)")

# There are few rounds: no reset, and full error feedback. Embeddings and heads at 8 bits gave no lower losses.
_FOUR_BITS = LoCo(beta=0.0, reset_steps=None, high_precision_bits=4)

_INTERVALS: dict[str, type[Interval]] = {
    interval.__name__.lower(): interval for interval in (AdaComm, Quadratic, Seconds, Stepwise)
}


def default_compressor(rule: OuterRule) -> Compressor:
    """The compressor of a rule's pseudo-gradients if the user chose none."""
    return rule.compressor() or _FOUR_BITS


def as_outer(value: object, field: str = "outer") -> OuterRule:
    """An outer rule, its name, or a mapping: ``{name: diloco, every: 30}``.

    Raises:
        ValueError: None of them, or an unknown name or option.
    """
    return convert(value, OuterRule, field, Source.CODE)  # type: ignore[type-abstract]


def _named(value: Any, known: Mapping[str, T], what: str) -> tuple[T, dict[str, Any]]:
    """The entry of `known` for a name or ``{name: ..., option: ...}``, and the options."""
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping):
        raise Mismatch
    options = dict(value)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ValueError(f"needs the {what}'s name under 'name', got {value!r}")
    if name.lower() not in known:
        raise ValueError(f"unknown {what} {name!r}{did_you_mean(name.lower(), known)} Known: {', '.join(known)}")
    return known[name.lower()], options


def _rule(value: Any, source: Source) -> OuterRule:
    base, options = _named(value, OUTER_RULES, "outer rule")
    preset = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    return call(type(base), preset | options, source)


def _interval(value: Any, source: Source) -> Interval:
    if isinstance(value, str) and (seconds := re.fullmatch(r"(\d+(?:\.\d+)?) ?s", value)):
        return Seconds(seconds=float(seconds[1]))
    cls, options = _named(value, _INTERVALS, "interval")
    return call(cls, options, source)


register_conversion(
    OuterRule,
    Conversion(
        _rule,
        "an outer rule such as DiLoCo(every=30), a name such as 'diloco' or {name: diloco, every: 30}",
        "an outer rule such as diloco or {name: diloco, every: 30}",
    ),
)
register_conversion(
    Interval,
    Conversion(
        _interval,
        "an interval such as Quadratic(alpha=0.02) or {name: quadratic, alpha: 0.02} or '30s'",
        "an interval such as {name: quadratic, alpha: 0.02} or '30s'",
    ),
)
