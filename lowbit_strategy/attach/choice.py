"""The door for what chooses among compressors while a model is trained."""

from __future__ import annotations


class Choice:
    """Nothing is chosen: the compressor stays. A choice at work derives from this."""

    @property
    def is_baseline(self) -> bool:
        """Whether steps are the framework's own, which the engine knows nothing of."""
        return False

    def end_step(self) -> None:
        """An optimizer step that counts is over, on all ranks."""

    def after_load(self) -> None:
        """A checkpoint's residuals have been loaded; on all ranks."""
