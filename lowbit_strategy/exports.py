"""What `lowbit_strategy` offers. Imported when a name of it is looked up: it takes a second."""

from lowbit_strategy.checkpoint.residual_files import ResidualFileError
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.methods.auto import Auto
from lowbit_strategy.methods.low_rank.acpsgd import ACPSGD
from lowbit_strategy.methods.low_rank.atomo import ATOMO
from lowbit_strategy.methods.low_rank.gradiveq import GradiVeQ
from lowbit_strategy.methods.low_rank.powersgd import PowerSGD
from lowbit_strategy.methods.outer.diloco import DiLoCo
from lowbit_strategy.methods.outer.eagerdiloco import EagerDiLoCo
from lowbit_strategy.methods.outer.interval import AdaComm, Quadratic, Seconds, Stepwise
from lowbit_strategy.methods.outer.localsgd import LocalSGD
from lowbit_strategy.methods.outer.overlaplocalsgd import OverlapLocalSGD
from lowbit_strategy.methods.outer.postlocalsgd import PostLocalSGD
from lowbit_strategy.methods.outer.registry import OUTER_RULES, as_outer
from lowbit_strategy.methods.outer.rule import OuterRule
from lowbit_strategy.methods.outer.sparseloco import SparseLoCo
from lowbit_strategy.methods.outer.streamingdiloco import StreamingDiLoCo
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
from lowbit_strategy.methods.registry import PRESETS, as_compressor, from_options, preset
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
from lowbit_strategy.methods.weights.base import WeightCoding
from lowbit_strategy.methods.weights.exact import Exact
from lowbit_strategy.methods.weights.registry import as_weights
from lowbit_strategy.methods.weights.weightcode import WeightCode
from lowbit_strategy.methods.weights.weightdelta import WeightDelta
from lowbit_strategy.methods.wrappers.ef21 import EF21
from lowbit_strategy.methods.wrappers.errorfeedback import ErrorFeedback
from lowbit_strategy.methods.wrappers.partition import Partition
from lowbit_strategy.methods.wrappers.rotate import Rotate
from lowbit_strategy.methods.wrappers.warmup import WarmUp
from lowbit_strategy.model.digest import DivergenceError
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
