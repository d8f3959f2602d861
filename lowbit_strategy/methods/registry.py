"""Every compressor by name, with its presets: what strategy names, configuration files and the command line use."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from lowbit_strategy.methods._base.base import Compressor
from lowbit_strategy.methods.low_rank.powersgd import PowerSGD
from lowbit_strategy.methods.quantization.dense import Dense
from lowbit_strategy.methods.quantization.efsignsgd import EFSignSGD
from lowbit_strategy.methods.quantization.loco import LoCo
from lowbit_strategy.methods.quantization.multiscale import MultiScale
from lowbit_strategy.methods.quantization.naturalcompression import NaturalCompression
from lowbit_strategy.methods.quantization.onebitsgd import OneBitSGD
from lowbit_strategy.methods.quantization.qsgd import QSGD
from lowbit_strategy.methods.quantization.sharedscale import SharedScale
from lowbit_strategy.methods.quantization.signsgd import SignSGD
from lowbit_strategy.methods.quantization.terngrad import TernGrad
from lowbit_strategy.methods.sparsification.adacomp import AdaComp
from lowbit_strategy.methods.sparsification.dgc import DGC
from lowbit_strategy.methods.sparsification.exdyna import ExDyna
from lowbit_strategy.methods.sparsification.gtopk import GTopK
from lowbit_strategy.methods.sparsification.micro import MiCRO
from lowbit_strategy.methods.sparsification.randomk import RandomK
from lowbit_strategy.methods.sparsification.scalecom import ScaleCom
from lowbit_strategy.methods.sparsification.sidco import SIDCo
from lowbit_strategy.methods.sparsification.topk import TopK
from lowbit_strategy.methods.wrappers.ef21 import EF21
from lowbit_strategy.methods.wrappers.errorfeedback import ErrorFeedback
from lowbit_strategy.methods.wrappers.partition import Partition
from lowbit_strategy.methods.wrappers.rotate import Rotate
from lowbit_strategy.methods.wrappers.warmup import WarmUp

PRESETS: dict[str, Compressor] = {
    "adacomp": AdaComp(),
    "dense": Dense(),
    "dgc": DGC(warmup_steps=100),
    "ef21": EF21(),
    "efsignsgd": EFSignSGD(),
    "errorfeedback": ErrorFeedback(),
    "exdyna": ExDyna(),
    "gtopk": GTopK(),
    "loco": LoCo(),
    "loco1": LoCo(bits=1, levels="fitted", block_size=64, beta=0.95, return_beta=0.95, warmup_steps=128),
    "loco2": LoCo(bits=2, levels="fitted", block_size=64, beta=0.95, return_beta=0.95, warmup_steps=128),
    "loco3": LoCo(bits=3, levels="fitted", block_size=64),
    "loco_ternary": LoCo(bits=2, levels="ternary", block_size=128, beta=0.95, return_beta=0.95, warmup_steps=64),
    "micro": MiCRO(),
    "multiscale": MultiScale(),
    "naturalcompression": NaturalCompression(),
    "onebitsgd": OneBitSGD(),
    "partition": Partition(),
    "powersgd": PowerSGD(),
    "qsgd": QSGD(),
    "randomk": RandomK(),
    "rotate": Rotate(),
    "scalecom": ScaleCom(),
    "sharedscale": SharedScale(),
    "sidco": SIDCo(),
    "signsgd": SignSGD(),
    "terngrad": TernGrad(),
    "topk": TopK(),
    "warmup": WarmUp(),
}


def preset(name: str) -> Compressor:
    """The preset called `name`.

    Raises:
        ValueError: There is none; the message has the nearest name.
    """
    key = name.lower()
    if key not in PRESETS:
        near = get_close_matches(key, PRESETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown compressor {name!r}{hint} Known: {', '.join(sorted(PRESETS))}")
    return PRESETS[key]


def from_options(name: str, options: Mapping[str, Any]) -> Compressor:
    """The preset called `name` with `options` changed, as configuration files write it.

    Raises:
        ValueError: Unknown name or option, or an option out of range.
    """
    base = preset(name)
    known = [field.name for field in dataclasses.fields(base)]
    for key in options:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{name} has no option {key!r}{hint} Known: {', '.join(known)}")
    return dataclasses.replace(base, **{key: _value(key, value, base) for key, value in options.items()})


def _value(key: str, value: Any, base: Compressor) -> Any:
    """A configuration file's value as the field wants it."""
    if isinstance(getattr(base, key), Compressor):
        return nested(value)
    if key == "rules" and isinstance(value, list):
        return tuple((selector, nested(compressor)) for selector, compressor in value)
    return tuple(value) if isinstance(value, list) else value


def nested(value: Any) -> Any:
    """A compressor inside another one: a preset's name, or a mapping of ``compressor`` (the name) and options.

    Raises:
        ValueError: Neither.
    """
    if isinstance(value, str):
        return preset(value)
    if isinstance(value, Mapping):
        options = dict(value)
        if not isinstance(name := options.pop("compressor", None), str):
            raise ValueError(f"a compressor inside another one needs its name under 'compressor', got {value!r}")
        return from_options(name, options)
    return value
