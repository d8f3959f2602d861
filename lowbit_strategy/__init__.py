"""Compressed gradient synchronisation for PyTorch training: one line to turn on.

Importing this package registers the strategy names ``<compressor>_ddp`` and ``<compressor>_fsdp`` with Lightning and
Fabric, whichever of their namespaces is or will be imported.
"""

import logging

from lowbit_strategy.reducers.base import Compressor
from lowbit_strategy.reducers.dense import Dense
from lowbit_strategy.reducers.loco import LoCo
from lowbit_strategy.reducers.registry import PRESETS, from_options, preset
from lowbit_strategy.register import register_when_imported
from lowbit_strategy.version import __version__

__all__ = ["PRESETS", "Compressor", "Dense", "LoCo", "__version__", "from_options", "preset"]

_log = logging.getLogger(__name__)
if not logging.getLogger().hasHandlers() and not _log.handlers:  # the start-up report is for everyone to see
    _log.addHandler(logging.StreamHandler())
    _log.setLevel(logging.INFO)
    _log.propagate = False

register_when_imported()
