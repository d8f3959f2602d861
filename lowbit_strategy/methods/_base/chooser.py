"""Base classes for compressors that choose another compressor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import DENSE, Compressor


class Choice:
    """Chooses the compressor during training; a session follows it. This one never changes the compressor."""

    @property
    def is_baseline(self) -> bool:
        """Whether steps are the framework's own, which bypass the engine."""
        return False

    def end_step(self) -> None:
        """A counted optimizer step is over on all ranks."""

    def after_load(self) -> None:
        """A checkpoint's residuals have been loaded. Called on all ranks."""


class Chooser(Compressor, ABC):
    """A compressor that only chooses. Until it has chosen, steps are the framework's own, with its buckets."""

    def method(self, spec: TensorSpec) -> CodecPair:
        """Float32 through the engine's messages, which sends the rest of a replaced compressor's residuals."""
        return DENSE

    @abstractmethod
    def begin(self, prepared: Any, sync: Any, wiring: Any) -> Choice:
        """Begin to choose for one model.

        Args:
            prepared: The `PreparedModel`, with this as its compressor.
            sync: The engine; nothing calls it yet.
            wiring: Switches between the framework's communication and the engine's.
        """
