"""DDP under Lightning, gradients compressed; independent of the Lightning namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.hooks.attach import Prepared, attach_ddp, prepare
from lowbit_strategy.hooks.ddp import GLOO_BUCKET_CAP_MB, check_ddp_options
from lowbit_strategy.lightning.base_strategy import LowBitMixin
from lowbit_strategy.methods._base.base import Compressor

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object


class LowBitDDPMixin(LowBitMixin, _Base):
    """See `lowbit_strategy.lightning.LowBitDDPStrategy`."""

    _prepared: Prepared

    def __init__(
        self,
        compressor: Compressor | None = None,
        *,
        seed: int = 0,
        on_world_size_change: str = "reset",
        on_missing_residual: str = "error",
        **kwargs: Any,
    ) -> None:
        for option in ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper"):
            if kwargs.get(option) is not None:  # LightningCLI passes every default
                raise ValueError(f"the compressor is the communication hook: leave {option} out")
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

    def configure_ddp(self) -> None:
        assert self.lightning_module is not None
        self._prepared = prepare(self.lightning_module, self.compressor, self.options, scatter=False)
        if self.root_device.type == "cpu":
            self._ddp_kwargs.setdefault("bucket_cap_mb", GLOO_BUCKET_CAP_MB)
        super().configure_ddp()

    def _register_ddp_hooks(self) -> None:
        """Stock Lightning registers hooks on CUDA only; ours serve CPU as well."""
        assert isinstance(self.model, DistributedDataParallel)
        attached = attach_ddp(
            self.model, self._prepared, device=self.root_device, has_scaler=self.loss_scaler is not None
        )
        self.on_attached(attached)

    def on_unfrozen(self) -> None:
        """DDP synchronises what was trainable when it wrapped, so the module is wrapped anew; stock DDP would let the
        ranks drift apart without a word.
        """
        assert self.attached is not None
        assert self.lightning_module is not None
        assert isinstance(self.model, DistributedDataParallel)
        self.model._remove_autograd_hooks()
        wrapped = self._setup_model(self.lightning_module)
        self.model = wrapped
        self.attached.cover(wrapped)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: `lowbit_strategy.register` does it, for both kinds."""
