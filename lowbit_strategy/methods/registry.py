"""Every compressor by name, with its presets: what strategy names, configuration files and the command line use."""

from __future__ import annotations

from dataclasses import replace

from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.presets import as_compressor, from_options, preset, register_presets
from lowbit_strategy.methods.low_rank.acpsgd import ACPSGD
from lowbit_strategy.methods.low_rank.atomo import ATOMO
from lowbit_strategy.methods.low_rank.gradiveq import GradiVeQ
from lowbit_strategy.methods.low_rank.powersgd import PowerSGD
from lowbit_strategy.methods.quantization.dense import Dense
from lowbit_strategy.methods.quantization.eden import EDEN
from lowbit_strategy.methods.quantization.efsignsgd import EFSignSGD
from lowbit_strategy.methods.quantization.loco import LoCo
from lowbit_strategy.methods.quantization.multiscale import MultiScale
from lowbit_strategy.methods.quantization.naturalcompression import NaturalCompression
from lowbit_strategy.methods.quantization.onebitsgd import OneBitSGD
from lowbit_strategy.methods.quantization.qsgd import QSGD
from lowbit_strategy.methods.quantization.sharedscale import SharedScale
from lowbit_strategy.methods.quantization.signsgd import SignSGD
from lowbit_strategy.methods.quantization.terngrad import TernGrad
from lowbit_strategy.methods.quantization.threelc import ThreeLC
from lowbit_strategy.methods.sparsification.adacomp import AdaComp
from lowbit_strategy.methods.sparsification.deft import DEFT
from lowbit_strategy.methods.sparsification.dgc import DGC
from lowbit_strategy.methods.sparsification.exdyna import ExDyna
from lowbit_strategy.methods.sparsification.gspar import GSpar
from lowbit_strategy.methods.sparsification.gtopk import GTopK
from lowbit_strategy.methods.sparsification.micro import MiCRO
from lowbit_strategy.methods.sparsification.randomk import RandomK
from lowbit_strategy.methods.sparsification.scalecom import ScaleCom
from lowbit_strategy.methods.sparsification.sidco import SIDCo
from lowbit_strategy.methods.sparsification.sketchedsgd import SketchedSGD
from lowbit_strategy.methods.sparsification.topk import TopK
from lowbit_strategy.methods.wrappers.ef21 import EF21
from lowbit_strategy.methods.wrappers.errorfeedback import ErrorFeedback
from lowbit_strategy.methods.wrappers.partition import Partition
from lowbit_strategy.methods.wrappers.rotate import Rotate
from lowbit_strategy.methods.wrappers.warmup import WarmUp

__all__ = ["PRESETS", "as_compressor", "from_options", "preset"]

_UNIT_GAIN = LoCo(bits=3, codebook="unit_gain", block_size=64, reset_steps=None)

# Below 4 bits LoCo is never reset: its residual then holds several gradients that a reset would throw away.
PRESETS: dict[str, Compressor] = {
    "acpsgd": ACPSGD(),
    "adacomp": AdaComp(),
    "atomo": ATOMO(),
    "deft": DEFT(),
    "dense": Dense(),
    "dgc": DGC(warmup_steps=100),
    "eden": EDEN(),
    "ef21": EF21(),
    "efsignsgd": EFSignSGD(),
    "errorfeedback": ErrorFeedback(),
    "exdyna": ExDyna(),
    "gradiveq": GradiVeQ(),
    "gspar": GSpar(),
    "gtopk": GTopK(),
    "loco": LoCo(),
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
    "loco_uniform": LoCo(codebook="uniform"),  # as published
    "loco_ternary": replace(_UNIT_GAIN, bits=2, codebook="ternary_unit_gain", return_beta=0.8),
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
    "signum": SignSGD(momentum=0.9),
    "sketchedsgd": SketchedSGD(),
    "terngrad": TernGrad(),
    "threelc": ThreeLC(),
    "topk": TopK(),
    "warmup": WarmUp(),
}

register_presets(PRESETS)
