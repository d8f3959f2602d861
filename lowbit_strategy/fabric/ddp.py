"""DDP under Fabric, gradients compressed; independent of the Fabric namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.fabric.base_strategy import LowBitFabricMixin
from lowbit_strategy.hooks.attach import Attached, attach_ddp, prepare
from lowbit_strategy.hooks.ddp import GLOO_BUCKET_CAP_MB, check_ddp_options
from lowbit_strategy.methods._base.base import Compressor

if TYPE_CHECKING:
    from lightning.fabric.strategies import DDPStrategy as _Base
else:
    _Base = object


class LowBitFabricDDPMixin(LowBitFabricMixin, _Base):
    """See `lowbit_strategy.fabric.LowBitDDPStrategy`."""

    def __init__(
        self,
        compressor: Compressor | None = None,
        *,
        seed: int = 0,
        on_world_size_change: str = "reset",
        on_missing_residual: str = "error",
        **kwargs: Any,
    ) -> None:
        check_ddp_options(kwargs, super().__init__)
        super().__init__(**kwargs)
        self.configure(
            compressor,
            {
                "seed": seed,
                "on_world_size_change": on_world_size_change,
                "on_missing_residual": on_missing_residual,
            },
        )

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Fabric's DDP has no option for hooks: wrap, then attach."""
        if not any(param.requires_grad for param in module.parameters()):
            return super().setup_module(module)  # inference only: DDP says what it thinks of that
        prepared = prepare(module, self.compressor, self.options, scatter=False)
        if self.root_device.type == "cpu":
            self._ddp_kwargs.setdefault("bucket_cap_mb", GLOO_BUCKET_CAP_MB)
        wrapped = super().setup_module(module)
        self.attach(attach_ddp(wrapped, prepared, device=self.root_device, has_scaler=self.loss_scaler is not None))
        return wrapped

    def on_unfrozen(self, attached: Attached) -> None:
        raise RuntimeError(
            f"{attached.newly_trainable()[0]} was frozen when the model was set up and is trained now, which DDP does"
            " not see: call fabric.setup(module, optimizer) again after unfreezing (with the module itself, not with"
            " what setup returned)"
        )

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: `lowbit_strategy.register` does it, for both kinds."""
