"""DDP under Lightning, gradients compressed; independent of the Lightning namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.attach.attach import attach_ddp
from lowbit_strategy.attach.prepare import Prepared, prepare
from lowbit_strategy.attach.session import Session
from lowbit_strategy.attach.strategy_options import DDPConstructor
from lowbit_strategy.lightning.base_strategy import LowBitMixin

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object

_UNUSED = "Expected to have finished reduction in the prior iteration"  # PyTorch's words


class LowBitDDPMixin(LowBitMixin, DDPConstructor, _Base):
    """See `lowbit_strategy.lightning.LowBitDDPStrategy`."""

    _prepared: Prepared

    def configure_ddp(self) -> None:
        assert self.lightning_module is not None
        self._prepared = prepare(self.lightning_module, self.compressor, self.options, scatter=False)
        self.choose_buckets(self.root_device)
        super().configure_ddp()

    def _register_ddp_hooks(self) -> None:
        """Stock Lightning registers hooks on CUDA only; ours serve CPU as well."""
        assert isinstance(self.model, DistributedDataParallel)
        session = attach_ddp(
            self.model, self._prepared, device=self.root_device, has_scaler=self.loss_scaler is not None
        )
        self.on_attached(session)

    def must_extend(self, session: Session) -> bool:
        waits = not session.trains_locally and not getattr(self.model, "find_unused_parameters", True)
        return bool(session.newly_trainable()) or (waits and bool(session.newly_frozen()))

    def on_unfrozen(self, session: Session) -> None:
        """DDP synchronises what was trainable when it wrapped, so the module is wrapped anew; stock DDP would let the
        ranks drift apart silently. It waits for what has been frozen since, and would stop.
        """
        if session.trains_locally:  # DDP synchronises nothing
            session.extend()
            return
        assert self.lightning_module is not None
        assert isinstance(self.model, DistributedDataParallel)
        self.model._remove_autograd_hooks()
        wrapped = self._setup_model(self.lightning_module)
        session.extend(wrapped)  # before the old wrapper goes, which would take the process group with it
        self.model = wrapped

    def on_exception(self, exception: BaseException) -> None:
        """Lightning's own advice for unused parameters is a strategy without compression."""
        if not any(_UNUSED in str(argument) for argument in exception.args):
            super().on_exception(exception)
            return
        advice = (
            "The model has parameters that the loss of training_step does not depend on, and DDP waits for their"
            ' gradients. If that is intended, use Trainer(strategy="loco_ddp_find_unused_parameters_true") (or the same'
            f" name of another compressor), or {type(self).__name__}(..., find_unused_parameters=True)."
        )
        exception.args = ("\n".join([advice, *map(str, exception.args)]),)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: `lowbit_strategy.register` does it, for both kinds."""
