"""DDP under Fabric, gradients compressed; independent of the Fabric namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.attach.attach import attach_ddp, prepare
from lowbit_strategy.attach.session import Session
from lowbit_strategy.attach.strategy_options import DDPConstructor
from lowbit_strategy.fabric.base_strategy import LowBitFabricMixin

if TYPE_CHECKING:
    from lightning.fabric.strategies import DDPStrategy as _Base
else:
    _Base = object


class LowBitFabricDDPMixin(LowBitFabricMixin, DDPConstructor, _Base):
    """See `lowbit_strategy.fabric.LowBitDDPStrategy`."""

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Fabric's DDP has no option for hooks: wrap, then attach."""
        if not any(param.requires_grad for param in module.parameters()):
            return super().setup_module(module)  # inference only: DDP's own error says that it is not needed
        prepared = prepare(module, self.compressor, self.options, scatter=False)
        self.choose_buckets(self.root_device)
        wrapped = super().setup_module(module)
        self.attach(attach_ddp(wrapped, prepared, device=self.root_device, has_scaler=self.loss_scaler is not None))
        return wrapped

    def on_unfrozen(self, session: Session) -> None:
        if session.trains_locally:  # DDP synchronises nothing
            session.cover()
            return
        raise RuntimeError(
            f"{session.newly_trainable()[0]} was frozen when the model was set up and is trained now, which DDP does"
            " not see: call fabric.setup(module, optimizer) again after unfreezing (with the module itself, not with"
            " what setup returned)"
        )

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: `lowbit_strategy.register` does it, for both kinds."""
