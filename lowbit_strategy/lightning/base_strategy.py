"""The base class of both strategies: steps, loss scale, checkpoints."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lowbit_strategy.adaptation.model_control import ModelControl
from lowbit_strategy.attach.constructors import LowBitStrategy
from lowbit_strategy.attach.session import CHECKPOINT_KEY, Session
from lowbit_strategy.checkpoint import residual_files
from lowbit_strategy.checkpoint.capture import check_last_step
from lowbit_strategy.checkpoint.residual_files import Stamp
from lowbit_strategy.control.base import describe
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.model.handshake import handshake

from .signals import DeferredSignals
from .stock import ParallelStrategy

_log = logging.getLogger("lowbit_strategy")

# If they differ, ranks gather weights or reduce gradients at different times, and wait for each other forever.
_SAME_ON_ALL_RANKS = (
    "accumulate_grad_batches",
    "val_check_interval",
    "check_val_every_n_epoch",
    "limit_val_batches",
    "num_sanity_val_steps",
    "enable_validation",
)


class SessionStrategy(LowBitStrategy, ParallelStrategy):
    """A strategy with a `Session`. Subclasses attach compression in their set-up and call `take_over`."""

    session: Session | None = None
    _session_module: Any = None
    _in_fit = False  # whether the session belongs to the current fit
    _has_resumed = False  # since the session was attached or a checkpoint was loaded into it
    _waiting_calls: tuple[Callable[[GradientSync], None], ...] = ()  # for the coming fit's engine
    _waiting_checkpoint: tuple[Any, Stamp | None] | None = None  # for the coming fit's session
    _signals: DeferredSignals | None = None
    _validates: contextlib.ExitStack | None = None  # set while the model has the weights that ranks share
    _rounds_adapter: Any = None  # the local steps' adapter, in rounds

    @property
    def sync(self) -> GradientSync | None:
        """The engine, available once a fit is set up: methods, state, accounting."""
        return self.session.sync if self.session is not None else None

    @property
    def _trainer(self) -> Any:
        """The Trainer of this strategy; None until it has a module."""
        return self.lightning_module.trainer if self.lightning_module is not None else None

    def call_with_engine(self, call: Callable[[GradientSync], None]) -> None:
        """Call `call` with the coming fit's engine as soon as there is one, before a checkpoint is loaded."""
        self._waiting_calls = (*self._waiting_calls, call)

    def take_over(self, session: Session) -> None:
        """Take over a new session: give it the state of an earlier fit or of a waiting checkpoint."""
        module, trainer = self.lightning_module, self._trainer
        handshake({f"Trainer({name}=...)": repr(getattr(trainer, name, None)) for name in _SAME_ON_ALL_RANKS})
        calls, self._waiting_calls = self._waiting_calls, ()
        for call in calls:  # first, so that the state of what they add is restored with the rest
            call(session.sync)
        if self.session is not None:
            if self._session_module is module:
                session.adopt(self.session)
            self.session.close()
        self.session, self._session_module, self._in_fit = session, module, True
        self._has_resumed = False
        self._rounds_adapter = None if session.sync.ranks.alone else self.options.adapter("lightning")
        self._load_waiting()

    def _load_waiting(self) -> None:
        """Load a checkpoint's residuals as soon as their engine exists."""
        if self._waiting_checkpoint is not None and self.session is not None and self._in_fit:
            waiting, self._waiting_checkpoint = self._waiting_checkpoint, None
            self.session.load(*waiting)
            self._has_resumed = False

    def on_train_start(self) -> None:
        super().on_train_start()
        trainer = self._trainer
        if trainer is None or self.session is None:
            return
        signals = self._defer_signals(trainer)
        signals.begin()
        self.options.check_optimizers(self.compressor, self.optimizers)
        self.session.clipped(trainer.gradient_clip_val, "gradient_clip_val")
        self._begin(self.session, trainer, signals)
        for logger in trainer.loggers:
            names = {"lowbit/strategy": type(self).__name__, "lowbit/compressor": describe(self.compressor)}
            logger.log_hyperparams(names | self.options.chosen)

    def on_train_end(self) -> None:
        if self._signals is not None:
            self._signals.finish()
        if self.sync is not None:
            check_last_step(self.sync)
        super().on_train_end()

    def _defer_signals(self, trainer: Any) -> DeferredSignals:
        if self._signals is None or self._signals.trainer is not trainer:
            self._signals = DeferredSignals(trainer)
        self._signals.install()
        return self._signals

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.session is not None:
            self._resume_session(self.session)
            self.session.begin_forward()
            self.serve_unfrozen(self.session)
            if self.session.replica is not None:
                self.session.replica.count_samples(_batch_size(args[0] if args else kwargs.get("batch")))
        return super().training_step(*args, **kwargs)

    def serve_unfrozen(self, session: Session) -> None:
        """Synchronize parameters that have been unfrozen since set-up. Called on all ranks."""
        if session.frozen.newly_trainable():
            session.extend()

    def pre_backward(self, closure_loss: Any) -> None:
        super().pre_backward(closure_loss)
        if self.session is not None:
            if self._signals is not None and self._rounds_adapter is None and self.session.sync.ranks.peers.is_far:
                self._signals.ask()
            self.session.begin_step(self.loss_scaler, loss=closure_loss.detach())

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        if self.session is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        control = ModelControl.of(self.session.sync)
        with contextlib.nullcontext(closure) if control is None else control.scaled(optimizer, closure) as scaled:
            output = super().optimizer_step(optimizer, scaled, model, **kwargs)
        self.session.end_step(optimizer, self.loss_scaler)
        return output

    # -- weights that ranks share -------------------------------------------------------------------------------------

    def _begin(self, session: Session, trainer: Any, signals: DeferredSignals) -> None:
        """Begin a fit, when the checkpoint has been loaded and callbacks are complete."""
        session.bind(lambda: self.optimizers, lambda: self.loss_scaler)
        if self._rounds_adapter is None:
            signals.answer_with(signals.agree)
        else:
            self._rounds_adapter.begin(trainer, session, signals)
        self._resume_session(session)

    def _resume_session(self, session: Session) -> None:
        """Resume the session when training begins, or continues after a finder has restored the earlier state."""
        if not self._has_resumed:
            self._has_resumed = True
            session.resume()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        read = super().lightning_module_state_dict
        return read() if self.session is None or not self._in_fit else self.session.shared_state(read)

    def on_validation_start(self) -> None:
        if self.session is not None and self._in_fit:
            if (trainer := self._trainer) is not None:
                self._defer_signals(trainer)
            self._validates = self._validates or contextlib.ExitStack()
            self._validates.enter_context(self.session.shared_weights())
        super().on_validation_start()

    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self._validates is not None:
            self._validates.close()

    def process_dataloader(self, dataloader: object) -> object:
        """Give each rank its samples if replicas come and go, since the framework does not know all ranks."""
        dataloader, trainer = super().process_dataloader(dataloader), self._trainer
        if trainer is None or trainer.state.stage != "train" or self.session is None or self.session.replica is None:
            return dataloader
        return self._rounds_adapter.with_own_samples(dataloader, trainer)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.session is None:
            self._warn_of_lost_residuals()
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if not self._writes:
            return
        later = _finish_writing(self.checkpoint_io)
        with self.session.save(filepath, asynchronous=later) as stamp, self.session.shared_weights(validates=False):
            self.barrier()  # Trainer.save_checkpoint runs on all ranks: no checkpoint lacks a rank's residuals
            checkpoint[CHECKPOINT_KEY] = stamp
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def _warn_of_lost_residuals(self) -> None:
        """Warn that spawned or forked processes have ended with the fit, and their residuals are lost."""
        start_method = getattr(self, "_start_method", "popen")
        if start_method != "popen" and getattr(self.launcher, "_already_fit", False):
            _log.warning(
                "this checkpoint has no residuals: the processes that trained (start_method=%r) have ended. Save with"
                " ModelCheckpoint, which saves while they run, or resume with residuals of zero",
                start_method,
            )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if (trainer := self._trainer) is not None and trainer.state.fn == "fit":
            self._waiting_checkpoint = (checkpoint_path, checkpoint.get(CHECKPOINT_KEY))
            self._load_waiting()  # a learning rate finder loads in the middle of a fit and removes the file
        return checkpoint

    @property
    def _writes(self) -> bool:
        return self.session is None or self.session.pace.writes_checkpoints

    def remove_checkpoint(self, filepath: Any) -> None:
        if not self._writes:
            return
        super().remove_checkpoint(filepath)
        residual_files.remove(filepath, self.global_rank, self.world_size)

    def teardown(self) -> None:
        self._in_fit = False
        if self.session is not None:
            self.session.close()
        super().teardown()


def _finish_writing(checkpoint_io: Any) -> bool:
    """Wait until all started checkpoints are complete. Return whether they are written while training continues.

    Raises:
        BaseException: The error that prevented the last write.
    """
    if not any(base.__name__ == "AsyncCheckpointIO" for base in type(checkpoint_io).__mro__):
        return False
    if checkpoint_io._executor is not None:  # a single thread, so this comes after all started writes
        checkpoint_io._executor.submit(bool).result()
    if checkpoint_io._error is not None:
        raise checkpoint_io._error
    return True


def _batch_size(batch: Any) -> int:
    """The batch size, from the first tensor that has dims; 1 if there is none."""
    sizes = (leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())
    return next(sizes, 1)
