"""DDP under Fabric, gradients compressed; independent of the Fabric namespace."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.attach.attach import attach_ddp
from lowbit_strategy.attach.prepare import prepare
from lowbit_strategy.attach.strategy_options import DDPConstructor
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.fabric.base_strategy import LowBitFabricMixin
from lowbit_strategy.fabric.bases import DDPStrategy
from lowbit_strategy.options.documentation import documented_options


@documented_options(SyncOptions)
class LowBitFabricDDPMixin(LowBitFabricMixin, DDPConstructor, DDPStrategy):
    """DDP with compressed gradient synchronisation. With one rank nothing is compressed.

    Args:
        compressor: A configuration such as ``LoCo(bits=4)``, the default, or a preset's name such as ``"loco2"``.
        @SyncOptions: seed, outer and the others that are for DDP; what they do is filled in from there.
        kwargs: As for Fabric's ``DDPStrategy``.

    Raises:
        TypeError: An option is unknown.
        ValueError: An option is out of range, or a communication hook is given.
    """

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Fabric's DDP has no option for hooks: wrap, then attach."""
        if not any(param.requires_grad for param in module.parameters()):
            return super().setup_module(module)  # inference only: DDP's own error says that it is not needed
        prepared = prepare(module, self.compressor, self.options, scatter=False)
        self.choose_buckets(self.root_device)
        wrapped = super().setup_module(module)
        self.attach(attach_ddp(wrapped, prepared, device=self.root_device, has_scaler=self.loss_scaler is not None))
        return wrapped
