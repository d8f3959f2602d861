"""What `lowbit_strategy` offers. Imported when a name of it is looked up: it takes a second."""

from lowbit_strategy.checkpoint.residual_files import ResidualFileError
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.auto import Auto
from lowbit_strategy.methods.dense import Dense
from lowbit_strategy.methods.dgc import DGC
from lowbit_strategy.methods.errorfeedback import ErrorFeedback
from lowbit_strategy.methods.exdyna import ExDyna
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.mixtures import Partition, WarmUp
from lowbit_strategy.methods.outer.interval import AdaComm, Quadratic, Seconds, Stepwise
from lowbit_strategy.methods.outer.published import (
    OUTER_RULES,
    DiLoCo,
    EagerDiLoCo,
    LocalSGD,
    OverlapLocalSGD,
    PostLocalSGD,
    SparseLoCo,
    StreamingDiLoCo,
    as_outer,
)
from lowbit_strategy.methods.outer.rule import OuterRule
from lowbit_strategy.methods.powersgd import PowerSGD
from lowbit_strategy.methods.qsgd import QSGD
from lowbit_strategy.methods.registry import PRESETS, as_compressor, from_options, preset
from lowbit_strategy.methods.topk import TopK
from lowbit_strategy.methods.weights import Exact, WeightCode, WeightCoding, WeightDelta, as_weights
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
from lowbit_strategy.model.handshake import DivergenceError
from lowbit_strategy.ranks.elastic import Elastic
from lowbit_strategy.rounds.elastic_sampler import ElasticSampler
from lowbit_strategy.version import __version__

__all__ = [
    "ACPSGD",
    "ATOMO",
    "DEFT",
    "DGC",
    "EDEN",
    "EF21",
    "OUTER_RULES",
    "PRESETS",
    "QSGD",
    "AdaComm",
    "AdaComp",
    "Auto",
    "Compressor",
    "Dense",
    "DiLoCo",
    "DivergenceError",
    "EFSignSGD",
    "EagerDiLoCo",
    "Elastic",
    "ElasticSampler",
    "ErrorFeedback",
    "ExDyna",
    "Exact",
    "GSpar",
    "GTopK",
    "GradiVeQ",
    "LoCo",
    "LocalSGD",
    "MiCRO",
    "MultiScale",
    "NaturalCompression",
    "OneBitSGD",
    "OuterRule",
    "OverlapLocalSGD",
    "Partition",
    "PostLocalSGD",
    "PowerSGD",
    "Quadratic",
    "RandomK",
    "ResidualFileError",
    "Rotate",
    "SIDCo",
    "ScaleCom",
    "Seconds",
    "SharedScale",
    "SignSGD",
    "SketchedSGD",
    "SparseLoCo",
    "Stepwise",
    "StreamingDiLoCo",
    "TensorSpec",
    "TernGrad",
    "ThreeLC",
    "TopK",
    "WarmUp",
    "WeightCode",
    "WeightCoding",
    "WeightDelta",
    "__version__",
    "as_compressor",
    "as_outer",
    "as_weights",
    "from_options",
    "preset",
]
