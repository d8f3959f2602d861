"""An `Accelerator` that takes a `LowBitPlugin` as it takes Accelerate's own plugins."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator

from lowbit_strategy.accelerate.plugin import LowBitPlugin


class LowBitAccelerator(Accelerator):
    """As `accelerate.Accelerator`, with compressed gradient synchronisation.

    Args:
        args, kwargs: As for `accelerate.Accelerator`.
        lowbit_plugin: Configuration; `LowBitPlugin()`, 4-bit LoCo, by default.
    """

    def __init__(self, *args: Any, lowbit_plugin: LowBitPlugin | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plugin = lowbit_plugin if lowbit_plugin is not None else LowBitPlugin()
        plugin.attach(self, fsdp_plugin=kwargs.get("fsdp_plugin"))
