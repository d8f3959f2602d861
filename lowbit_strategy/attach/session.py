"""Compression at work on one model, made by `attach_ddp` or `attach_fsdp` and called by the framework's adapter."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.attach.frozen import Frozen
from lowbit_strategy.attach.gradient_use import GradientUse
from lowbit_strategy.attach.loss_scale import LossScale
from lowbit_strategy.attach.mistakes import (
    CLIPPED_AFTERWARDS,
    MADE_BEFORE_SHARDING,
    MANY_PASSES,
    NO_STEP_HAS_ENDED,
    SHARED_IN_ROUNDS,
    UNFROZEN_UNDER_DDP,
    why_nothing_was_sent,
)
from lowbit_strategy.attach.optimizer_hook import is_superseded, stop_watching, watch_optimizers
from lowbit_strategy.attach.pace import Pace
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.checkpoint.agreement import agree_on_stamp
from lowbit_strategy.checkpoint.capture import capture
from lowbit_strategy.checkpoint.residual_files import ResidualFileError, Stamp
from lowbit_strategy.checkpoint.restoring import keep_fitting, restore, restore_on_all_ranks
from lowbit_strategy.checkpoint.saver import ResidualSaver
from lowbit_strategy.engine.backward_pass import in_backward
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.hooks.ddp import DDPHook
from lowbit_strategy.hooks.fsdp import FSDPHook
from lowbit_strategy.hooks.runners import BucketRunner
from lowbit_strategy.inform import inform
from lowbit_strategy.telemetry.startup_report import startup_report

CHECKPOINT_KEY = "lowbit_strategy"

_log = logging.getLogger("lowbit_strategy")
Hook = DDPHook | FSDPHook  # feeds the engine during training


class Session:
    """Compression at work on one model: the interface for the framework's adapter.

    Args:
        sync: The engine.
        module: The model, without DDP around it.
        options: Those given to `prepare`.
        pace: Decides when ranks meet, and whether the engine reduces anything.
        hook: The hook of DDP, or of FSDP2.

    Attributes:
        module: The argument.
    """

    def __init__(
        self,
        sync: GradientSync,
        module: nn.Module,
        options: SyncOptions,
        pace: Pace,
        *,
        hook: Hook | None = None,
    ) -> None:
        self.sync, self.options, self.pace = sync, options, pace
        self._ranks = sync.all_ranks  # `close` destroys the groups made for them
        self._let_go_of_owner: Callable[[], object] = lambda: None
        self.module, self._hook = module, hook
        self._saver = ResidualSaver(sync)
        self.has_loaded = False
        self._warned = False
        self._passes_without_step = 0  # backward passes since an optimizer stepped, if any has reduced
        self._warned_of_clipping = False
        self._is_open = False  # an optimizer has stepped, and the step has not ended yet
        self._rest: Callable[[], None] | None = None  # of a step that this rank has ended alone
        self._scale = LossScale()
        self._use = GradientUse(module, sync)
        sync.ask_rates_of(self._use)
        # Optimizers whose steps end the session's step.
        self._ending: weakref.WeakKeyDictionary[torch.optim.Optimizer, None] = weakref.WeakKeyDictionary()
        # Those that have stepped since the last backward pass, and whether the step counted.
        self._counted: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        self.is_closed = False
        self.frozen = Frozen(module)
        watch_optimizers(self)
        if isinstance(hook, FSDPHook):
            self._end_with(self, _give_back, hook.worker, [group for ranks in self._ranks for group in ranks.own])

    @property
    def is_in_rounds(self) -> bool:
        """Whether gradients currently stay on this rank."""
        return self.sync.rounds is not None

    @property
    def is_baseline(self) -> bool:  # steps are the framework's own: chosen, or being timed
        return self.pace.is_baseline

    @property
    def _is_in_ddp(self) -> bool:
        """Whether the model is in DDP, which, unlike FSDP2, synchronizes only what was trained at set-up."""
        return self.sync.weights is None

    @property
    def replica(self) -> Any:
        """This replica, where replicas join and leave; otherwise None."""
        return self.pace.replica

    def bind(self, optimizers: Callable[[], Iterable[torch.optim.Optimizer]], scaler: Callable[[], Any]) -> None:
        """Set the optimizers and the scaler.

        Args:
            optimizers: Returns the optimizers; any that step no parameter of this model are ignored.
            scaler: Returns the gradient scaler, or None.
        """
        self._use.bind(optimizers)
        self.pace.bind(lambda: [each for each in optimizers() if self.owns(each)], scaler)

    def end_after(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Let every step of these optimizers end the session's step, without a call of `end_step`."""
        self._ending.update(dict.fromkeys(optimizers))

    # -- a step ---------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Begin a training forward pass, if the framework exposes that point. Weights may change until then."""
        self._end_open_step()
        self.pace.begin_forward()

    def _end_open_step(self) -> None:
        """Training continues: end the step that an optimizer took, unless it has been ended."""
        if self._is_open:
            self._end_alone()
        self._end_together()
        self._use.stepped.clear()

    def begin_step(self, scaler: Any = None, *, loss: torch.Tensor | None = None) -> None:
        """Begin a backward pass. Call it before each one, on all ranks, in the thread and stream of training.

        1. the step that an optimizer took is ended, unless it has been ended already
        2. reductions whose gradients were cleared without a step are set aside
        3. parameters that have been unfrozen are synchronized from now on
        4. in the first backward pass of a step, controllers decide, methods may change, and residuals are rescaled with
           the loss scale

        Args:
            scaler: The ``GradScaler`` that scales the loss, or None.
            loss: Loss of the batch before scaling, for the record and for rounds whose length depends on it.

        Raises:
            RuntimeError: Nothing synchronizes a parameter that is trained now, or, in rounds, another session has
                parameters of this model.
        """
        self.begin_pass(loss)
        self.begin_reducing(scaler)

    def begin_pass(self, loss: torch.Tensor | None = None) -> None:
        """Steps 1 to 3 of `begin_step`, which a rank performs even if it runs the backward pass alone."""
        self._counted.clear()
        self.sync.listeners.begin_pass(loss)
        if self.is_in_rounds and is_superseded(self):
            raise RuntimeError(SHARED_IN_ROUNDS)
        if not self.is_in_rounds:  # a synchronization would change weights that the forward pass has used
            self._end_open_step()
        self._use.follow(self.frozen, is_served=self.pace.serves_replaced)
        self._use.roll_back_cleared()
        if unfrozen := self.frozen.newly_trainable():
            if self._is_in_ddp and not self.is_in_rounds:
                raise RuntimeError(UNFROZEN_UNDER_DDP.format(unfrozen[0]))
            self.extend()
        self.pace.begin_backward(loss)

    def begin_reducing(self, scaler: Any = None) -> None:
        """Step 4 of `begin_step`, which ranks perform together, at the latest when DDP has a pass's first gradients."""
        if self.is_in_rounds or self.is_baseline or self.sync.in_step:  # frameworks call this for all their models
            self._passes_without_step += 1
            if self._passes_without_step == MANY_PASSES:
                self._warn(NO_STEP_HAS_ENDED)
        if self.is_in_rounds or self.is_baseline or self.sync.ranks.alone:
            return
        self.sync.begin_step(self._scale.of_step(scaler, begins=not self.sync.has_begun))
        self._use.note_delivered()

    def end_step(self, optimizer: torch.optim.Optimizer | None = None, scaler: Any = None) -> bool:
        """End a step. Call it after every optimizer step, even a skipped one, and after ``scaler.update()``.

        Without this call, the step ends when training continues. The call is required with a loss scaler, or an
        optimizer that does not derive from torch's.

        Args:
            optimizer: The optimizer that has stepped, needed in rounds; None: there is only one.
            scaler: See `begin_step`. Its scale is read here, so that the host need not wait for the device before
                backward.

        Returns:
            Whether the step counted.

        Raises:
            RuntimeError: `optimizer` steps no parameter of this model, and no other optimizer has stepped one.
            DivergenceError: Raised on every rank if parameters were compared after this step and differ.
        """
        if not self._is_open:
            if optimizer is not None and self._use.moves_nothing(optimizer):
                return False
            ended = [counted for each, counted in self._counted.items() if optimizer in (None, each)]
            if ended:  # the step ended without a call
                if scaler is not None:
                    self._scale.read(scaler)
                return any(ended)
        self.weights_changed()
        counted = self._end_alone(optimizer, scaler)
        self._end_together()
        return counted

    def _end_alone(self, optimizer: torch.optim.Optimizer | None = None, scaler: Any = None) -> bool:
        """The part of `end_step` that this rank does alone, except in rounds or if a loss scaler may skip the step."""
        if optimizer is not None and not self._use.any_owner(optimizer):
            raise RuntimeError(MADE_BEFORE_SHARDING)
        was_open, self._is_open = self._is_open, False
        stepped = self._use.take_stepped() if was_open else self._use.would_step(optimizer)
        if not was_open:
            self._passes_without_step = 0
        if self.is_in_rounds:
            self.pace.after_optimizer(optimizer)
            return True
        if scaler is not None:
            self._scale.read(scaler)
        if self.is_baseline:
            self._rest = self.pace.end_step
            return True
        has_stepped = was_open or stepped is None
        if has_stepped and not self._warned and self.sync.sent_nbytes == 0 and self.sync.ranks.peers.world_size > 1:
            self._warned = True
            why = why_nothing_was_sent(self.module, waits=self._is_in_ddp)
            _log.warning("rank %d: %s", self.sync.ranks.rank, why)
        if stepped is None:
            self._use.settle_all()
        synchronized = self.sync.in_step
        counted = self.sync.end_step_alone(stepped)

        def end_together() -> None:
            self.sync.listeners.all_have_ended()
            if synchronized:
                self.pace.after_optimizer(optimizer)
            if counted:
                self.pace.end_step()

        self._rest = self._rest or end_together  # once, although each of several optimizers may have ended it alone
        return counted

    def _end_together(self) -> None:
        """The part of `end_step` that ranks do together, when all have ended the step or will before continuing."""
        rest, self._rest = self._rest, None
        if rest is not None:
            rest()

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def save(self, path: Any, *, asynchronous: bool = False) -> contextlib.AbstractContextManager[Stamp]:
        """A context for writing the checkpoint `path`. Each rank saves its own residuals without waiting for the
        others, so use it on all ranks. If some do not save, their residuals are missing, and a resumed run says so. In
        rounds all ranks must save.

        1. this rank writes its residuals next to the checkpoint; if it cannot, a warning says so
        2. the block writes the checkpoint, which must contain the value that the context returns, under
           `CHECKPOINT_KEY`
        3. when rank 0 leaves the block, the residuals of a replaced checkpoint are removed; after an exception, those
           of this one are

        Args:
            path: Path of the checkpoint, the same on all ranks.
            asynchronous: The block only starts to write, from copies. Writing must finish before the next save, which
                then does step 3.
        """
        if self._is_open:
            self._end_alone()
        self.pace.arrive()
        return self._saver.around(path, asynchronous=asynchronous)

    def load(self, path: Any, stamp: Stamp | ResidualFileError | None) -> None:
        """Restore what `save` wrote, on all ranks together.

        Args:
            path: The checkpoint.
            stamp: The checkpoint's value under `CHECKPOINT_KEY`. None: an uncompressed run wrote it. An error: why it
                cannot be read.

        Raises:
            ResidualFileError: A rank's file is missing or damaged, and `on_missing_residual` does not accept that.
            ValueError: The residuals belong to a different model.
        """
        if not self.is_in_rounds:
            self._end_open_step()
        self._saver.begin_run()
        self.has_loaded = True
        self._scale.forget()  # the scaler is loaded as well
        self.sync.listeners.checkpoint_loaded()
        if self.sync.weights is not None:
            self.sync.weights.forget()
        stamp, warning = agree_on_stamp(path, stamp, self.options.on_missing_residual, self.sync.ranks.group)
        if warning is not None:
            self._warn(f"{warning}; continuing with residuals of zero on all ranks")
            self.sync.forget()
            return
        if stamp is None:
            self._warn(f"{path} was saved without compression: residuals start from zero")
            return
        self.sync.extend(self.frozen.describe(stamp["parameters"]))
        restore_on_all_ranks(
            self.sync,
            path,
            stamp,
            on_world_size_change=self.options.on_world_size_change,
            on_missing_residual=self.options.on_missing_residual,
        )
        self.pace.after_load()

    @property
    def last_saved(self) -> int | None:
        """The step of the last `save` on this rank."""
        return self._saver.last_step

    def weights_changed(self) -> None:
        """Send weights again in the next gather, because they changed between a forward and its backward pass. Call it
        on all ranks.
        """
        self.sync.weights_changed()

    def weights_unchanged(self) -> None:
        """Keep the weights for the next micro-batch, because no optimizer has stepped. Call it on all ranks."""
        if self.sync.weights is not None:
            self.sync.weights.unchanged()

    def resume(self) -> None:
        """Call this, after `load`, when everything has been loaded, or when training begins. Needed in rounds."""
        self.pace.resume()

    def finish(self) -> None:
        """End training. Call it on all ranks, which then have the same weights."""
        self._end_open_step()
        self.pace.finish()

    def shared_weights(self, *, validates: bool = True) -> contextlib.AbstractContextManager[None]:
        """A context in which the model has the weights that all ranks share. Use it for validation (it warns if the
        last one saw the same weights), or with ``validates=False`` for saving.
        """
        return self.pace.shared_weights(validates=validates)

    def shared_state(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of `read` on the weights that all ranks share; in rounds a copy, since they change later."""
        if not self.is_in_rounds:
            return read()
        with self.shared_weights(validates=False):
            state = read()
            return {name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in state.items()}

    def clipped(self, clip: float | None, option: str) -> None:
        """Note that gradients are clipped at `clip`; None and 0: they are not. With sparse methods, warn once."""
        if clip and self.sync.compressor.is_sparse and not self._warned_of_clipping:
            self._warned_of_clipping = True
            self._warn(CLIPPED_AFTERWARDS.format(option, clip))

    def _warn(self, text: str) -> None:
        if self.sync.ranks.logs:
            _log.warning("%s", text)

    def adopt(self, earlier: Session) -> None:
        """Continue with the state of an earlier session of the same model (a second fit), which may have changed."""
        self.sync.extend(self.frozen.describe(earlier.sync.specs))
        saved, kept = capture(earlier.sync), earlier.sync.rank_state
        # other objects now follow the steps
        of_optimizers: tuple[object, ...] = (earlier.pace, earlier.sync.transactions.follower)
        saved["own"] = {name: each for name, each in saved["own"].items() if kept[name] not in of_optimizers}
        if keep_fitting(self.sync, saved):
            self.pace.adopt(earlier.pace)
        restore(self.sync, saved, load_rank=lambda _: saved, on_world_size_change="reset")
        self.pace.after_load()

    def extend(self, model: DistributedDataParallel | None = None) -> None:
        """Also synchronize newly trainable parameters. Call it between steps, on all ranks together.

        Args:
            model: The model wrapped again, since DDP synchronizes only what was trainable when it wrapped the model.
                Not needed for FSDP2.
        """
        specs, params = self.frozen.take_newly_trainable()
        self.sync.extend(specs)
        self.pace.extend(params)
        if model is not None and isinstance(self._hook, DDPHook):
            self._hook.close()
            self._hook = self._hook.rewrapped(model)
            self.close_with(model)
            self.frozen.rewrapped()
            self.pace.wrapped_by(model)
        if specs and self.sync.ranks.logs:
            inform("%d more parameters are trained now\n%s", len(specs), startup_report(self.sync))

    def owns(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._use.owns(optimizer)

    def on_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after every step of an optimizer in this process."""
        if not self.owns(optimizer) or self._use.moves_nothing(optimizer):
            return
        if not self._use.knows(optimizer):
            self.options.check_optimizers(self.sync.compressor, [optimizer])
        self._use.on_optimizer_step(optimizer)
        self._is_open, self._passes_without_step = True, 0
        if in_backward():  # others may step in the same pass: the next pass ends the step
            return
        self.weights_changed()
        if optimizer in self._ending:
            self._counted[optimizer] = self.end_step(optimizer)

    def serves(self, module: nn.Module) -> bool:
        """Whether `module` is this model, however it is wrapped."""
        return self._use.serves(module)

    @property
    def param_ids(self) -> Set[int]:
        return self._use.param_ids

    def close(self) -> None:
        """End the hook's thread and destroy the process groups made for it. State can still be read and saved.

        A thread that has not ended, for example after an error on another rank, may wait in a collective; then the
        groups stay.
        """
        self.is_closed = True
        stop_watching(self)
        self._let_go_of_owner()
        has_ended = self._hook is None or self._hook.close()
        has_ended = self.pace.close() and has_ended
        all_ranks, self._ranks = self._ranks, []
        if not has_ended:
            return
        comms = [] if self.sync.weights is None else self.sync.weights.comms
        for ranks in all_ranks:
            ranks.destroy()
            for comm in comms:
                comm.release(ranks.own)

    def close_with(self, model: DistributedDataParallel) -> None:
        """Close when `model` is garbage-collected, instead of an earlier wrapper."""
        self._use.wrapped_by(model)
        self._end_with(model, self.close)

    def _end_with(self, owner: object, end: Callable[..., object], *values: object) -> None:
        """Call `end`, which does not hold `owner`, when `owner` is garbage-collected."""
        self._let_go_of_owner()
        finalizer = weakref.finalize(owner, end, *values)
        finalizer.atexit = False
        self._let_go_of_owner = finalizer.detach


def _give_back(worker: BucketRunner | None, groups: list[dist.ProcessGroup]) -> None:
    """End the threads and destroy the process groups of a session whose sharded model is gone."""
    if worker is not None and not worker.close():
        return
    for group in groups:
        with contextlib.suppress(ValueError):  # all groups have been destroyed
            dist.destroy_process_group(group)
