"""DDP under Lightning, gradients compressed; independent of the Lightning namespace."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.attach.attach import attach_ddp
from lowbit_strategy.attach.prepare import Prepared, prepare
from lowbit_strategy.attach.session import Session
from lowbit_strategy.attach.strategy_options import DDPConstructor
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.lightning.base_strategy import LowBitMixin
from lowbit_strategy.lightning.bases import DDPStrategy
from lowbit_strategy.options.documentation import documented_options

_UNUSED = "Expected to have finished reduction in the prior iteration"  # PyTorch's words


@documented_options(SyncOptions)
class LowBitDDPMixin(LowBitMixin, DDPConstructor, DDPStrategy):
    """DDP with compressed gradient synchronisation.

    Args:
        compressor: A configuration such as ``LoCo(bits=4)``, the default, or a preset's name such as ``"loco2"``.
        @SyncOptions: seed, outer and the others that are for DDP; what they do is filled in from there.
        kwargs: As for ``DDPStrategy``, without its hooks. In a notebook ``start_method="fork"`` (the name
            ``loco_ddp_notebook``) trains on several processes; with ``"fork"`` and ``"spawn"`` save with
            ``ModelCheckpoint``: when ``fit`` has returned, the processes have ended and their residuals are gone.

    With one rank nothing is compressed.

    Raises:
        TypeError: An option is unknown.
        ValueError: An option is out of range, or a communication hook is given.
    """

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

    def serve_unfrozen(self, session: Session) -> None:
        """DDP synchronises what was trainable when it wrapped, so the module is wrapped anew; stock DDP would let the
        ranks drift apart silently. It waits for what has been frozen since, and would stop.
        """
        if session.trains_locally:  # DDP synchronises nothing
            super().serve_unfrozen(session)
            return
        waits = not getattr(self.model, "find_unused_parameters", True)
        if not session.frozen.newly_trainable() and not (waits and session.frozen.newly_frozen()):
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
