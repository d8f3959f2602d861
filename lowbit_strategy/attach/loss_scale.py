"""Reads the loss scale of the coming gradients."""

from __future__ import annotations

from typing import Any


class LossScale:
    """The scale of the next gradients. Reading it waits for the device, so it is read once per step.

    Attributes:
        value: None without a scaler.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        self._is_new = False  # whether it was read for the next step

    def read(self, scaler: Any) -> None:
        """Read the next step's scale, if there is a scaler, after a step has ended."""
        self._is_new = scaler is not None and scaler.is_enabled()
        if self._is_new:
            self.value = float(scaler.get_scale())

    def of_step(self, scaler: Any, *, begins: bool) -> float | None:
        """The scale before a backward pass. It is read now if the pass `begins` a step and the end of the last step did
        not read it.
        """
        if begins and not self._is_new:
            self.read(scaler)
        self._is_new = False
        return self.value

    def forget(self) -> None:
        """Forget the value, because the scaler has a different scale now."""
        self._is_new = False
