"""Ways of sending weights by name: what is accepted wherever ``weights=`` is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.presets import register_other_names
from lowbit_strategy.methods.quantization.loco import LoCo
from lowbit_strategy.methods.weights.base import WeightCoding
from lowbit_strategy.methods.weights.exact import Exact
from lowbit_strategy.methods.weights.weightcode import WeightCode
from lowbit_strategy.methods.weights.weightdelta import WeightDelta
from lowbit_strategy.options.conversion import Conversion, Mismatch, Source, call, convert, register_conversion
from lowbit_strategy.options.suggestions import did_you_mean

WEIGHTS: dict[str, type[WeightCoding]] = {"exact": Exact, "code": WeightCode, "delta": WeightDelta}

register_other_names(WEIGHTS, "it is a way of sending weights, weights={!r} beside a compressor (FSDP2)")

# Everything that reports compare, and what a configuration file may name in one word.
CHOICES: tuple[WeightCoding, ...] = (
    Exact(),
    Exact(keep="replica"),
    WeightCode(keep="nothing"),
    WeightCode(),
    WeightCode(keep="replica"),
    WeightDelta(),
)


def default_weights(compressor: Compressor) -> WeightCoding:
    """What a strategy does with weights where the user has not chosen: LoCo's codes them at 8 bits.

    Other compressors leave them exact: nothing about weights has been measured with them.
    """
    return WeightCode() if isinstance(compressor, LoCo) else Exact()


def check_weights(weights: WeightCoding | None, *, scatter: bool) -> None:
    """Raises:
    ValueError: Weights are to be coded where no rank gathers any.
    """
    if weights is not None and not scatter:
        raise ValueError(
            f"weights={type(weights).__name__}(...) is for FSDP2, whose ranks gather weights: under DDP every rank has"
            " them all. Leave weights out, or use FSDP2 (loco_fsdp; fsdp_version: 2)"
        )


def as_weights(value: object) -> WeightCoding:
    """`Exact`, `WeightCode` or `WeightDelta` as it is, or what a name such as ``"delta4"`` or a mapping stands for.

    Raises:
        ValueError: None of them, or an unknown name or option.
    """
    return convert(value, WeightCoding, "weights", Source.CODE)  # type: ignore[type-abstract]


def _make(value: Any, source: Source) -> WeightCoding:
    """From ``code``, ``code8``, ``{name: delta, bits: 4}``."""
    if isinstance(value, str):
        name, digits = re.fullmatch(r"(.*?)(\d*)", value.strip(), re.DOTALL).groups()  # type: ignore[union-attr]
        options: dict[str, Any] = {"bits": int(digits)} if digits else {}
    elif isinstance(value, Mapping) and isinstance(value.get("name"), str):
        options = dict(value)
        name = options.pop("name")
    else:
        raise Mismatch
    plain = name.lower().removeprefix("weight").strip("_- ")
    if plain not in WEIGHTS:
        raise ValueError(
            f"unknown way of sending weights {name!r}{did_you_mean(plain, WEIGHTS)} Known: {', '.join(WEIGHTS)}"
        )
    return call(WEIGHTS[plain], options, source)


_NAMES = "a name such as 'exact', 'code8' or 'delta4', or {name: delta, bits: 4}"
register_conversion(
    WeightCoding,
    Conversion(_make, f"Exact(), WeightCode(), WeightDelta(), {_NAMES}", _NAMES),
)
