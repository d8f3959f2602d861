"""Compressed gradient synchronisation for PyTorch training: one line to turn on.

Importing this package registers the strategy names ``<compressor>_ddp`` and ``<compressor>_fsdp`` with Lightning and
Fabric, whichever of their namespaces is or will be imported.
"""

import logging

from lowbit_strategy.reducers.adacomp import AdaComp
from lowbit_strategy.reducers.base import Compressor
from lowbit_strategy.reducers.dense import Dense
from lowbit_strategy.reducers.dgc import DGC
from lowbit_strategy.reducers.ef21 import EF21
from lowbit_strategy.reducers.efsignsgd import EFSignSGD
from lowbit_strategy.reducers.errorfeedback import ErrorFeedback
from lowbit_strategy.reducers.exdyna import ExDyna
from lowbit_strategy.reducers.gtopk import GTopK
from lowbit_strategy.reducers.loco import LoCo
from lowbit_strategy.reducers.micro import MiCRO
from lowbit_strategy.reducers.multiscale import MultiScale
from lowbit_strategy.reducers.natural import NaturalCompression
from lowbit_strategy.reducers.onebitsgd import OneBitSGD
from lowbit_strategy.reducers.partition import Partition
from lowbit_strategy.reducers.powersgd import PowerSGD
from lowbit_strategy.reducers.qsgd import QSGD
from lowbit_strategy.reducers.randomk import RandomK
from lowbit_strategy.reducers.registry import PRESETS, from_options, preset
from lowbit_strategy.reducers.rotate import Rotate
from lowbit_strategy.reducers.scalecom import ScaleCom
from lowbit_strategy.reducers.sharedscale import SharedScale
from lowbit_strategy.reducers.sidco import SIDCo
from lowbit_strategy.reducers.signsgd import SignSGD
from lowbit_strategy.reducers.terngrad import TernGrad
from lowbit_strategy.reducers.topk import TopK
from lowbit_strategy.reducers.warmup import WarmUp
from lowbit_strategy.register import register_when_imported
from lowbit_strategy.version import __version__

__all__ = [
    "DGC",
    "EF21",
    "PRESETS",
    "QSGD",
    "AdaComp",
    "Compressor",
    "Dense",
    "EFSignSGD",
    "ErrorFeedback",
    "ExDyna",
    "GTopK",
    "LoCo",
    "MiCRO",
    "MultiScale",
    "NaturalCompression",
    "OneBitSGD",
    "Partition",
    "PowerSGD",
    "RandomK",
    "Rotate",
    "SIDCo",
    "ScaleCom",
    "SharedScale",
    "SignSGD",
    "TernGrad",
    "TopK",
    "WarmUp",
    "__version__",
    "from_options",
    "preset",
]

_log = logging.getLogger(__name__)
if not logging.getLogger().hasHandlers() and not _log.handlers:  # the start-up report is for everyone to see
    _log.addHandler(logging.StreamHandler())
    _log.setLevel(logging.INFO)
    _log.propagate = False

register_when_imported()
