"""The public names of `lowbit_strategy`, except compressors (`methods/entries.py`) and optional parts (`leaves`).

This module takes a second to import, so it is imported only when a name is looked up.
"""

from lowbit_strategy.checkpoint.residual_files import ResidualFileError as ResidualFileError
from lowbit_strategy.collectives.layout import TensorSpec as TensorSpec
from lowbit_strategy.custom_loop import compress as compress
from lowbit_strategy.methods._base.compressor import Compressor as Compressor
from lowbit_strategy.methods.registry import PRESETS as PRESETS
from lowbit_strategy.methods.registry import as_compressor as as_compressor
from lowbit_strategy.methods.registry import from_options as from_options
from lowbit_strategy.methods.registry import preset as preset
from lowbit_strategy.methods.weight_codings import Exact as Exact
from lowbit_strategy.methods.weight_codings import WeightCode as WeightCode
from lowbit_strategy.methods.weight_codings import WeightCoding as WeightCoding
from lowbit_strategy.methods.weight_codings import WeightDelta as WeightDelta
from lowbit_strategy.methods.weight_codings import as_weights as as_weights
from lowbit_strategy.version import __version__ as __version__
