"""Compressed gradient synchronization for PyTorch training, by strategy name or from Accelerate's config file.

Importing this package registers the strategy names ``<compressor>_ddp`` and ``<compressor>_fsdp`` with Lightning and
Fabric, in whichever of their namespaces is imported, now or later. If the package is installed, ``import torch`` does
the same.
"""

import contextlib
import importlib.util
import sys
from typing import TYPE_CHECKING

from lowbit_strategy.autoload import serve
from lowbit_strategy.version import __version__ as __version__

if TYPE_CHECKING:
    from lowbit_strategy.auto import Auto as Auto
    from lowbit_strategy.divergence import DivergenceError as DivergenceError
    from lowbit_strategy.elastic import Elastic as Elastic
    from lowbit_strategy.elastic import ElasticSampler as ElasticSampler
    from lowbit_strategy.exports import *  # noqa: F403
    from lowbit_strategy.local_steps import *  # noqa: F403

    # table: compressor_imports
    from lowbit_strategy.methods.dense import Dense as Dense
    from lowbit_strategy.methods.dgc import DGC as DGC
    from lowbit_strategy.methods.efsignsgd import EFSignSGD as EFSignSGD
    from lowbit_strategy.methods.exdyna import ExDyna as ExDyna
    from lowbit_strategy.methods.loco import LoCo as LoCo
    from lowbit_strategy.methods.powersgd import PowerSGD as PowerSGD
    from lowbit_strategy.methods.qsgd import QSGD as QSGD
    from lowbit_strategy.methods.randomk import RandomK as RandomK
    from lowbit_strategy.methods.signsgd import SignSGD as SignSGD
    from lowbit_strategy.methods.topk import TopK as TopK
    from lowbit_strategy.methods.zoo.acpsgd import ACPSGD as ACPSGD
    from lowbit_strategy.methods.zoo.adacomp import AdaComp as AdaComp
    from lowbit_strategy.methods.zoo.atomo import ATOMO as ATOMO
    from lowbit_strategy.methods.zoo.chunktopk import ChunkTopK as ChunkTopK
    from lowbit_strategy.methods.zoo.composed import Partition as Partition
    from lowbit_strategy.methods.zoo.composed import WarmUp as WarmUp
    from lowbit_strategy.methods.zoo.deft import DEFT as DEFT
    from lowbit_strategy.methods.zoo.eden import EDEN as EDEN
    from lowbit_strategy.methods.zoo.ef21 import EF21 as EF21
    from lowbit_strategy.methods.zoo.errorfeedback import ErrorFeedback as ErrorFeedback
    from lowbit_strategy.methods.zoo.gradiveq import GradiVeQ as GradiVeQ
    from lowbit_strategy.methods.zoo.gspar import GSpar as GSpar
    from lowbit_strategy.methods.zoo.gtopk import GTopK as GTopK
    from lowbit_strategy.methods.zoo.micro import MiCRO as MiCRO
    from lowbit_strategy.methods.zoo.natural import NaturalCompression as NaturalCompression
    from lowbit_strategy.methods.zoo.onebitsgd import OneBitSGD as OneBitSGD
    from lowbit_strategy.methods.zoo.rotate import Rotate as Rotate
    from lowbit_strategy.methods.zoo.scalecom import ScaleCom as ScaleCom
    from lowbit_strategy.methods.zoo.sharedscale import MultiScale as MultiScale
    from lowbit_strategy.methods.zoo.sharedscale import SharedScale as SharedScale
    from lowbit_strategy.methods.zoo.sharedscale import TernGrad as TernGrad
    from lowbit_strategy.methods.zoo.sidco import SIDCo as SIDCo
    from lowbit_strategy.methods.zoo.sketchedsgd import SketchedSGD as SketchedSGD
    from lowbit_strategy.methods.zoo.threelc import ThreeLC as ThreeLC
    # end of table

serve()

_IN_FRAMEWORKS = {  # names that users look for here, and their locations
    "LowBitDDPStrategy": "lowbit_strategy.lightning (or .pytorch_lightning, .fabric, .lightning_fabric)",
    "LowBitFSDPStrategy": "lowbit_strategy.lightning (or .pytorch_lightning, .fabric, .lightning_fabric)",
    "AdaptiveCompression": "lowbit_strategy.lightning (or .pytorch_lightning)",
    "CompressionMonitor": "lowbit_strategy.lightning (or .pytorch_lightning)",
    "LowBitPlugin": "lowbit_strategy.accelerate",
    "LowBitAccelerator": "lowbit_strategy.accelerate",
    "attach": "lowbit_strategy.transformers",
    "adapt": "lowbit_strategy.fabric, or lowbit_strategy.custom_loop for your own loop",
    "monitor": "lowbit_strategy.fabric, or lowbit_strategy.custom_loop for your own loop",
    "SyncOptions": "lowbit_strategy.custom_loop",
}


def _look_up(name: str) -> object:
    """A name that has an entry, or one of `exports`.

    Names that need a framework live in that framework's module, so nothing here imports one.

    Raises:
        AttributeError: There is no such name. With a hint it is an ImportError for import statements, which would
            replace the message of an AttributeError.
    """
    error = ImportError if "importlib" in sys._getframe(1).f_code.co_filename else AttributeError
    if name in _IN_FRAMEWORKS:
        raise error(f"{name} is in {_IN_FRAMEWORKS[name]}, not in lowbit_strategy itself")
    missing = AttributeError(f"module {__name__!r} has no attribute {name!r}")
    is_module = importlib.util.find_spec(f"{__name__}.{name}") is not None  # an import statement then imports it
    if is_module or (name.startswith("_") and name != "__all__"):
        raise missing
    from lowbit_strategy import leaves
    from lowbit_strategy.options.conversion import nearest

    offered = _offered()
    if name in offered:
        globals()[name] = offered[name]
        return offered[name]
    if (target := _targets().get(name)) is not None:
        try:
            return leaves.load(target, name)
        except leaves.MissingPart as lacking:
            raise error(str(lacking)) from None
    known = {each.lower(): each for each in (*offered, *_IN_FRAMEWORKS)}
    if (near := nearest(name.lower(), known)) is not None:
        raise error(f"lowbit_strategy has no {name!r}; did you mean {known[near]!r}?")
    raise missing


def _targets() -> dict[str, str]:
    """Names that have an entry, and their locations: compressors' classes and optional parts."""
    from lowbit_strategy import leaves
    from lowbit_strategy.methods.entries import CLASSES

    return CLASSES | leaves.NAMES


def _offered() -> dict[str, object]:
    from lowbit_strategy import exports, leaves

    names = [each for each in vars(exports) if each == "__version__" or not each.startswith("_")]
    offered = {each: getattr(exports, each) for each in names}
    for each, target in _targets().items():
        with contextlib.suppress(leaves.MissingPart):  # even if a part needs a missing one
            offered[each] = leaves.load(target, each)
    return offered | {"__all__": sorted(offered)}


if not TYPE_CHECKING:  # type checkers know every name, and would accept any other
    __getattr__ = _look_up


def __dir__() -> list[str]:
    return sorted({*globals(), *_offered()})
