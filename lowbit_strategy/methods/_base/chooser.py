"""Compressors that choose others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import DENSE, Compressor


class Choice:
    """Nothing is chosen: the compressor stays. A choice at work derives from this, and a session follows it."""

    @property
    def is_baseline(self) -> bool:
        """Whether steps are the framework's own, which the engine knows nothing of."""
        return False

    def end_step(self) -> None:
        """An optimizer step that counts is over, on all ranks."""

    def after_load(self) -> None:
        """A checkpoint's residuals have been loaded; on all ranks."""


class Chooser(Compressor, ABC):
    """A compressor that only chooses: steps are the framework's own, with its own buckets, unless it has chosen."""

    def method(self, spec: TensorSpec) -> CodecPair:
        """Float32, through the engine's messages: what sends the rest of a chosen one's residuals."""
        return DENSE

    @abstractmethod
    def begin(self, prepared: Any, sync: Any, wiring: Any) -> Choice:
        """Begin to choose, for one model.

        Args:
            prepared: The `PreparedModel`, with this as its compressor.
            sync: The engine; nothing calls it yet.
            wiring: Switches between the framework's own communication and the engine's.
        """
