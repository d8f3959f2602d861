"""Base class for compressors that choose another compressor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import DENSE, Compressor


class Chooser(Compressor, ABC):
    """A compressor that only chooses. Until it has chosen, steps are the framework's own, with its buckets."""

    def method(self, spec: TensorSpec) -> CodecPair:
        """Float32 in the engine's messages, which also sends a replaced compressor's residuals."""
        return DENSE

    @abstractmethod
    def begin(self, prepared: Any, sync: Any, model: Any, hook: Any) -> Any:
        """Begin to choose for one model. Returns the session's `Pace`.

        Args:
            prepared: The `PreparedModel`, with this as its compressor.
            sync: The engine; nothing calls it yet.
            model: The model, which may be wrapped in DDP.
            hook: The hook through which the engine reduces, already in place.
        """
