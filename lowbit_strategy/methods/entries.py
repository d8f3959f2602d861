"""Every compressor by name, one line each. The registry, strategy names, exports, tests and pages are generated from
it.

A compressor's module is imported only when its name is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """A preset: a class and some of its options.

    Args:
        target: ``module:class``; modules of this package.
        options: The options that differ from the class's defaults.
    """

    target: str
    options: Mapping[str, Any]

    @property
    def class_name(self) -> str:
        return self.target.partition(":")[2]


def _of(where: str, **options: Any) -> Entry:
    return Entry(f"{__package__}.{where}", options)


# Below 4 bits LoCo is never reset: the residual then holds several gradients, which a reset would lose.
_UNIT_GAIN: dict[str, Any] = {"bits": 3, "codebook": "unit_gain", "block_size": 64, "reset_steps": None}
_ONE_BIT: dict[str, Any] = _UNIT_GAIN | {
    "bits": 1,
    "block_size": 32,
    "return_beta": 0.5,
    "return_bits": 2,
    "return_codebook": "ternary_unit_gain",
    "return_block_size": 64,
}
_TWO_BITS: dict[str, Any] = _UNIT_GAIN | {"bits": 2, "return_beta": 0.8}

ENTRIES: dict[str, Entry] = {
    "acpsgd": _of("zoo.acpsgd:ACPSGD"),
    "adacomp": _of("zoo.adacomp:AdaComp"),
    "atomo": _of("zoo.atomo:ATOMO"),
    "chunktopk": _of("zoo.chunktopk:ChunkTopK"),
    "deft": _of("zoo.deft:DEFT"),
    "dense": _of("dense:Dense"),
    "dgc": _of("dgc:DGC", warmup_steps=100),
    "eden": _of("zoo.eden:EDEN"),
    "ef21": _of("zoo.ef21:EF21"),
    "efsignsgd": _of("efsignsgd:EFSignSGD"),
    "errorfeedback": _of("zoo.errorfeedback:ErrorFeedback"),
    "exdyna": _of("exdyna:ExDyna"),
    "gradiveq": _of("zoo.gradiveq:GradiVeQ"),
    "gspar": _of("zoo.gspar:GSpar"),
    "gtopk": _of("zoo.gtopk:GTopK"),
    "loco": _of("loco:LoCo"),
    "loco1": _of("loco:LoCo", **_ONE_BIT),
    "loco2": _of("loco:LoCo", **_TWO_BITS),
    "loco3": _of("loco:LoCo", **_UNIT_GAIN),
    "loco4": _of("loco:LoCo"),
    "loco_ternary": _of("loco:LoCo", **_TWO_BITS | {"codebook": "ternary_unit_gain"}),
    "loco_uniform": _of("loco:LoCo", codebook="uniform"),  # as published
    "micro": _of("zoo.micro:MiCRO"),
    "multiscale": _of("zoo.sharedscale:MultiScale"),
    "naturalcompression": _of("zoo.natural:NaturalCompression"),
    "onebitsgd": _of("zoo.onebitsgd:OneBitSGD"),
    "partition": _of("zoo.composed:Partition"),
    "powersgd": _of("powersgd:PowerSGD"),
    "qsgd": _of("qsgd:QSGD"),
    "randomk": _of("randomk:RandomK"),
    "rotate": _of("zoo.rotate:Rotate"),
    "scalecom": _of("zoo.scalecom:ScaleCom"),
    "sharedscale": _of("zoo.sharedscale:SharedScale"),
    "sidco": _of("zoo.sidco:SIDCo"),
    "signsgd": _of("signsgd:SignSGD"),
    "signum": _of("signsgd:SignSGD", momentum=0.9),
    "sketchedsgd": _of("zoo.sketchedsgd:SketchedSGD"),
    "terngrad": _of("zoo.sharedscale:TernGrad"),
    "threelc": _of("zoo.threelc:ThreeLC"),
    "topk": _of("topk:TopK"),
    "warmup": _of("zoo.composed:WarmUp"),
}
CLASSES = {entry.class_name: entry.target for entry in ENTRIES.values()}
