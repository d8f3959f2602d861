"""What `lowbit_strategy` offers, except the names of parts that can be left out (`leaves`).

Imported when a name is looked up: it takes a second.
"""

from lowbit_strategy.checkpoint.residual_files import ResidualFileError as ResidualFileError
from lowbit_strategy.collectives.layout import TensorSpec as TensorSpec
from lowbit_strategy.custom_loop import compress as compress
from lowbit_strategy.methods._base.compressor import Compressor as Compressor
from lowbit_strategy.methods.composed import EF21 as EF21
from lowbit_strategy.methods.composed import ErrorFeedback as ErrorFeedback
from lowbit_strategy.methods.composed import Partition as Partition
from lowbit_strategy.methods.composed import Rotate as Rotate
from lowbit_strategy.methods.composed import WarmUp as WarmUp
from lowbit_strategy.methods.dense import Dense as Dense
from lowbit_strategy.methods.dgc import DGC as DGC
from lowbit_strategy.methods.exdyna import ExDyna as ExDyna
from lowbit_strategy.methods.exdyna import MiCRO as MiCRO
from lowbit_strategy.methods.loco import LoCo as LoCo
from lowbit_strategy.methods.powersgd import PowerSGD as PowerSGD
from lowbit_strategy.methods.qsgd import QSGD as QSGD
from lowbit_strategy.methods.randomk import RandomK as RandomK
from lowbit_strategy.methods.registry import PRESETS as PRESETS
from lowbit_strategy.methods.registry import Auto as Auto
from lowbit_strategy.methods.registry import as_compressor as as_compressor
from lowbit_strategy.methods.registry import from_options as from_options
from lowbit_strategy.methods.registry import preset as preset
from lowbit_strategy.methods.topk import TopK as TopK
from lowbit_strategy.methods.weight_codings import Exact as Exact
from lowbit_strategy.methods.weight_codings import WeightCode as WeightCode
from lowbit_strategy.methods.weight_codings import WeightCoding as WeightCoding
from lowbit_strategy.methods.weight_codings import WeightDelta as WeightDelta
from lowbit_strategy.methods.weight_codings import as_weights as as_weights
from lowbit_strategy.methods.zoo.acpsgd import ACPSGD as ACPSGD
from lowbit_strategy.methods.zoo.adacomp import AdaComp as AdaComp
from lowbit_strategy.methods.zoo.atomo import ATOMO as ATOMO
from lowbit_strategy.methods.zoo.deft import DEFT as DEFT
from lowbit_strategy.methods.zoo.eden import EDEN as EDEN
from lowbit_strategy.methods.zoo.efsignsgd import EFSignSGD as EFSignSGD
from lowbit_strategy.methods.zoo.gradiveq import GradiVeQ as GradiVeQ
from lowbit_strategy.methods.zoo.gspar import GSpar as GSpar
from lowbit_strategy.methods.zoo.gtopk import GTopK as GTopK
from lowbit_strategy.methods.zoo.natural import NaturalCompression as NaturalCompression
from lowbit_strategy.methods.zoo.onebitsgd import OneBitSGD as OneBitSGD
from lowbit_strategy.methods.zoo.scalecom import ScaleCom as ScaleCom
from lowbit_strategy.methods.zoo.sharedscale import MultiScale as MultiScale
from lowbit_strategy.methods.zoo.sharedscale import SharedScale as SharedScale
from lowbit_strategy.methods.zoo.sharedscale import TernGrad as TernGrad
from lowbit_strategy.methods.zoo.sidco import SIDCo as SIDCo
from lowbit_strategy.methods.zoo.signsgd import SignSGD as SignSGD
from lowbit_strategy.methods.zoo.sketchedsgd import SketchedSGD as SketchedSGD
from lowbit_strategy.methods.zoo.threelc import ThreeLC as ThreeLC
from lowbit_strategy.model.digest import DivergenceError as DivergenceError
from lowbit_strategy.version import __version__ as __version__
