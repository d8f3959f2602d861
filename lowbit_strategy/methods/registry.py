"""Every compressor by name, with its presets: what strategy names, configuration files and the command line use."""

from __future__ import annotations

from dataclasses import replace

from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.presets import as_compressor, from_options, preset, register_presets
from lowbit_strategy.methods.dense import Dense
from lowbit_strategy.methods.dgc import DGC
from lowbit_strategy.methods.errorfeedback import ErrorFeedback
from lowbit_strategy.methods.exdyna import ExDyna
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.mixtures import Partition, WarmUp
from lowbit_strategy.methods.powersgd import PowerSGD
from lowbit_strategy.methods.qsgd import QSGD
from lowbit_strategy.methods.topk import TopK
from lowbit_strategy.methods.zoo.acpsgd import ACPSGD
from lowbit_strategy.methods.zoo.adacomp import AdaComp
from lowbit_strategy.methods.zoo.atomo import ATOMO
from lowbit_strategy.methods.zoo.deft import DEFT
from lowbit_strategy.methods.zoo.eden import EDEN
from lowbit_strategy.methods.zoo.ef21 import EF21
from lowbit_strategy.methods.zoo.efsignsgd import EFSignSGD
from lowbit_strategy.methods.zoo.gradiveq import GradiVeQ
from lowbit_strategy.methods.zoo.gspar import GSpar
from lowbit_strategy.methods.zoo.gtopk import GTopK
from lowbit_strategy.methods.zoo.micro import MiCRO
from lowbit_strategy.methods.zoo.multiscale import MultiScale
from lowbit_strategy.methods.zoo.naturalcompression import NaturalCompression
from lowbit_strategy.methods.zoo.onebitsgd import OneBitSGD
from lowbit_strategy.methods.zoo.randomk import RandomK
from lowbit_strategy.methods.zoo.rotate import Rotate
from lowbit_strategy.methods.zoo.scalecom import ScaleCom
from lowbit_strategy.methods.zoo.sharedscale import SharedScale
from lowbit_strategy.methods.zoo.sidco import SIDCo
from lowbit_strategy.methods.zoo.signsgd import SignSGD
from lowbit_strategy.methods.zoo.sketchedsgd import SketchedSGD
from lowbit_strategy.methods.zoo.terngrad import TernGrad
from lowbit_strategy.methods.zoo.threelc import ThreeLC

__all__ = ["PRESETS", "as_compressor", "from_options", "preset"]

_WITH_DEFAULTS = (
    ACPSGD, ATOMO, AdaComp, DEFT, Dense, EDEN, EF21, EFSignSGD, ErrorFeedback, ExDyna, GradiVeQ, GSpar, GTopK, LoCo,
    MiCRO, MultiScale, NaturalCompression, OneBitSGD, Partition, PowerSGD, QSGD, RandomK, Rotate, ScaleCom, SharedScale,
    SIDCo, SignSGD, SketchedSGD, TernGrad, ThreeLC, TopK, WarmUp,
)  # fmt: skip

# Below 4 bits LoCo is never reset: the residual then holds several gradients, which a reset would lose.
_UNIT_GAIN = LoCo(bits=3, codebook="unit_gain", block_size=64, reset_steps=None)

PRESETS: dict[str, Compressor] = {
    **{compressor.name: compressor() for compressor in _WITH_DEFAULTS},
    "dgc": DGC(warmup_steps=100),
    "loco1": replace(
        _UNIT_GAIN,
        bits=1,
        block_size=32,
        return_beta=0.5,
        return_bits=2,
        return_codebook="ternary_unit_gain",
        return_block_size=64,
    ),
    "loco2": replace(_UNIT_GAIN, bits=2, return_beta=0.8),
    "loco3": _UNIT_GAIN,
    "loco4": LoCo(),
    "loco_ternary": replace(_UNIT_GAIN, bits=2, codebook="ternary_unit_gain", return_beta=0.8),
    "loco_uniform": LoCo(codebook="uniform"),  # as published
    "signum": SignSGD(momentum=0.9),
}
PRESETS = dict(sorted(PRESETS.items()))

register_presets(PRESETS)
