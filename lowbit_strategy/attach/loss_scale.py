"""The loss scale of the coming gradients."""

from __future__ import annotations

from typing import Any


class LossScale:
    """The scale of the next gradients. Reading it waits for the device, so it is read once per step.

    Attributes:
        value: None without a scaler.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        self._is_new = False  # it was read for the next step

    def read(self, scaler: Any) -> None:
        """A step has ended: read the scale of the next one, if there is a scaler."""
        self._is_new = scaler is not None and scaler.is_enabled()
        if self._is_new:
            self.value = float(scaler.get_scale())

    def of_step(self, scaler: Any, *, begins: bool) -> float | None:
        """The scale before a backward pass; read now if it `begins` a step and the last step's end did not read it."""
        if begins and not self._is_new:
            self.read(scaler)
        self._is_new = False
        return self.value

    def forget(self) -> None:
        """The scaler has another scale now."""
        self._is_new = False
