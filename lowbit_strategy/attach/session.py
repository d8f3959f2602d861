"""Compression at work on one model: what a framework's adapter calls once `attach_ddp` or `attach_fsdp` has made it."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.attach.auto import AutoChoice
from lowbit_strategy.attach.local_steps import LocalSteps
from lowbit_strategy.attach.optimizer_steps import forget_optimizers, watch_optimizers
from lowbit_strategy.attach.order_checks import MANY_PASSES, NO_STEP_HAS_ENDED, why_nothing_was_sent
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.attach.wiring import DDPWiring
from lowbit_strategy.checkpoint import capture
from lowbit_strategy.checkpoint.residual_files import ResidualFileError
from lowbit_strategy.checkpoint.resume import resume
from lowbit_strategy.checkpoint.save import ResidualSaver
from lowbit_strategy.checkpoint.stamp import Stamp, agree_on_stamp
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.hooks.ddp import DDPHook
from lowbit_strategy.hooks.worker import BackwardSide
from lowbit_strategy.inform import inform
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.model.digest import ParameterDigest
from lowbit_strategy.model.parameters import canonical_name, describe_parameters, trainable_parameters
from lowbit_strategy.ranks.ranks import Ranks
from lowbit_strategy.rounds.elastic_outer import ElasticOuterSync
from lowbit_strategy.telemetry.startup_report import build_report

CHECKPOINT_KEY = "lowbit_strategy"

_log = logging.getLogger("lowbit_strategy")


Hook = DDPHook | DDPWiring | BackwardSide  # what feeds the engine beside training


class Session:
    """Compression at work on one model: the interface for the framework's adapter.

    Args:
        sync: The engine.
        module: The model, without DDP around it.
        options: As given to `prepare`.
        group: All ranks; for agreements between steps. Not the group of the engine, which is gone after `close`.
        hook: DDP's, or what reduces shards over replicas.
        ranks: The engine's. `close` destroys the groups that were made for them alone.
        digest: Compares parameters, if they are to be compared.
        local: Local steps, if ranks train by themselves.
        shards: FSDP2 shards the model, and asks for what it has to synchronise in every step.
        auto: Chooses what is used, if the package is to.
    """

    def __init__(
        self,
        sync: GradientSync,
        module: nn.Module,
        options: SyncOptions,
        *,
        group: dist.ProcessGroup | None,
        hook: Hook | None = None,
        ranks: Ranks | None = None,
        digest: ParameterDigest | None = None,
        local: LocalSteps | None = None,
        shards: bool = False,
        auto: AutoChoice | None = None,
    ) -> None:
        self.sync = sync
        self.options, self.group = options, group
        self.local, self.shards, self.auto = local, shards, auto
        self._ranks = ranks
        self._digest = digest
        self._let_go_of_model: Callable[[], object] = lambda: None
        self._module, self._hook = module, hook
        self._warned = False
        self._saver = ResidualSaver(sync, group)
        self._num_passes = 0  # backward passes since a step has ended
        self._scale: float | None = None
        self._has_scale = False  # it has been read for the step to come
        self._params = {id(param) for param in module.parameters()}
        self._frozen = {canonical_name(n): param for n, param in module.named_parameters() if not param.requires_grad}
        self._expected = trainable_parameters(module)  # whose gradients DDP waits for
        watch_optimizers(self)

    @property
    def trains_locally(self) -> bool:
        """Whether gradients stay on this rank; False in the synchronous part of a rule that has one."""
        return self.local is not None and self.local.outer is not None

    @property
    def is_own(self) -> bool:
        """Whether steps are the framework's own: chosen, or timed."""
        return self.auto is not None and self.auto.is_own

    @property
    def replica(self) -> ElasticOuterSync | None:
        """This replica among others that come and go; None: all ranks stay."""
        outer = None if self.local is None else self.local.outer
        return outer if isinstance(outer, ElasticOuterSync) else None

    def bind(self, optimizers: Callable[[], Iterable[torch.optim.Optimizer]], scaler: Callable[[], Any]) -> None:
        """Name what each rank has for itself where steps are local, to be saved with its weights.

        Args:
            optimizers: Gives the optimizers; those that step no parameter of this model are left out.
            scaler: Gives the gradient scaler, or None.
        """
        if self.local is None:
            return

        def own() -> dict[str, Any]:
            owned = [each for each in optimizers() if self.owns(each)]
            parts: dict[str, Any] = {f"optimizer {at}": each for at, each in enumerate(owned)}
            return parts if scaler() is None else parts | {"scaler": scaler()}

        self.local.own = own

    # -- a step ---------------------------------------------------------------------------------------------------

    def begin_step(self, scaler: Any = None, *, loss: torch.Tensor | None = None) -> None:
        """Before every backward pass, on the thread and stream of training; on all ranks.

        1. parameters that have been unfrozen are served from now on
        2. the first of a step: controllers decide, parameters whose method changes are regrouped, and residuals follow
           the loss scale, which is read here unless `end_step` has read it

        Args:
            scaler: What the loss is multiplied by, a ``GradScaler`` or None.
            loss: Of the batch, before `scaler`: for rounds of local steps whose length follows it (`AdaComm`).

        Raises:
            RuntimeError: An optimizer has stepped and `end_step` has not been called since; or DDP does not know a
                parameter that is trained now.
        """
        self._num_passes += 1
        if self._num_passes == MANY_PASSES:
            self._warn(NO_STEP_HAS_ENDED)
        if self.newly_trainable():
            self._serve_unfrozen()
        if self.replica is not None:
            self.replica.check_joined()
        if self.trains_locally or self.is_own or self.sync.ranks.alone:
            self.sync.check_ended()
            if loss is not None and self.local is not None and self.local.outer is not None:
                self.local.outer.observe_loss(loss)
            return
        if not (self._has_scale or self.sync.has_begun):
            self._read_scale(scaler)
        self._has_scale = False  # it holds for the step that begins
        self.sync.begin_step(self._scale)

    def end_step(self, optimizer: torch.optim.Optimizer | None = None, scaler: Any = None) -> bool:
        """After every optimizer step, also one that a loss scaler has skipped, and after ``scaler.update()``.

        Args:
            optimizer: Which one has stepped, for local steps; None: the only one.
            scaler: As for `begin_step`. Reading its scale here, where it changes, keeps the host from waiting for the
                device before backward.

        Returns:
            Whether the step counted.

        Raises:
            DivergenceError: On every rank, if parameters were compared after this step and differ.
        """
        self.sync.acknowledge_step()
        self._num_passes = 0
        if self.trains_locally:
            assert self.local is not None
            self.local.after_optimizer(optimizer)
            return True
        if scaler is not None:
            self._has_scale = self._read_scale(scaler)
        if self.auto is not None and self.auto.is_own:
            return self.auto.end_step()
        comm = self.sync.ranks.peers
        if not self._warned and comm.sent_nbytes == 0 and comm.world_size > 1:
            self._warned = True
            waits = isinstance(self._hook, (DDPHook, DDPWiring))
            _log.warning("rank %d: %s", self.sync.ranks.rank, why_nothing_was_sent(self._module, waits=waits))
        synchronised = self.sync.in_step
        counted = self.sync.end_step()
        if self._digest is not None and synchronised and counted:
            self._digest.after_step(self.sync.step_index)
        if self.local is not None and synchronised:
            self.local.after_optimizer(optimizer)
        if self.auto is not None and counted:
            self.auto.end_step()
        return counted

    def _read_scale(self, scaler: Any) -> bool:
        """Returns whether there is one."""
        has_scale = scaler is not None and scaler.is_enabled()
        if has_scale:
            self._scale = float(scaler.get_scale())
        return has_scale

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def save(self, path: Any, *, asynchronous: bool = False) -> contextlib.AbstractContextManager[Stamp]:
        """Around the writing of the checkpoint `path`, on all ranks.

        1. every rank writes its residuals beside it; when the block is entered all have written theirs
        2. the block writes the checkpoint, which has to contain what the block is given, under `CHECKPOINT_KEY`
        3. when all ranks have left the block, residuals of a checkpoint that was replaced are removed

        Args:
            path: Of the checkpoint.
            asynchronous: The block begins to write, from copies, and 3. waits for the next save, before which it ends.

        Raises:
            ResidualFileError: On every rank, before anything is replaced, if one of them cannot write its file.
        """
        if self.local is not None:
            self.local.arrive()
        return self._saver.around(path, asynchronous=asynchronous)

    def load(self, path: Any, stamp: Stamp | ResidualFileError | None) -> None:
        """Restore what `save` wrote, on all ranks together.

        Args:
            path: The checkpoint.
            stamp: What it holds under `CHECKPOINT_KEY`; None: it was written by an uncompressed run. An error: why it
                cannot be read.

        Raises:
            ResidualFileError: A rank's file is missing or damaged, and ``on_missing_residual="error"``.
            ValueError: The residuals are of another model.
        """
        self._has_scale = False  # the scaler is loaded as well
        if self.sync.weights is not None:
            self.sync.weights.restart()
        try:
            stamp = agree_on_stamp(path, stamp, self.group)
        except ResidualFileError as error:
            if self.options.on_missing_residual == "error":
                raise
            self._warn(f"{error}; continuing with residuals of zero on all ranks")
            self.sync.forget()
            return
        if stamp is None:
            self._warn(f"{path} was saved without compression: residuals start from zero")
            return
        self.sync.extend(self._describe_frozen(stamp["parameters"]))
        resume(
            self.sync,
            path,
            stamp,
            group=self.group,
            on_world_size_change=self.options.on_world_size_change,
            on_missing_residual=self.options.on_missing_residual,
        )
        if self.auto is not None:
            self.auto.after_load()

    def weights_changed(self) -> None:
        """Weights were changed after a forward pass in training mode and before a backward pass: the next gather sends
        them. Call on all ranks; not needed at any other moment.
        """
        if self.sync.weights is not None:
            self.sync.weights.invalidate()

    def weights_unchanged(self) -> None:
        """Nothing steps on the gradients that have just been reduced, which are a micro-batch's: weights that have
        travelled serve the next one too. Call on all ranks.
        """
        if self.sync.weights is not None:
            self.sync.weights.unchanged()

    def resume(self) -> None:
        """The framework has loaded all that it saves, after `load`, or training begins; for local steps."""
        self.sync.acknowledge_step()  # torch steps an optimizer to make the state that it loads into
        if self.local is not None:
            self.local.resume()
        if self.replica is not None and self.sync.ranks.world.rank == 0:
            inform("%s", build_report(self.sync).render())  # only now it is known how many there are

    def finish(self) -> None:
        """Training ends on this rank; call on all ranks. After local steps all ranks have the same weights then."""
        if self.local is not None:
            self.local.finish()

    def shared_weights(self, *, validates: bool = True) -> contextlib.AbstractContextManager[None]:
        """Inside, the model has what all ranks share, and not this rank's own weights: to validate, to save.

        Args:
            validates: Warn, once, if these are the weights that the last validation has seen. False: to save.
        """
        return contextlib.nullcontext() if self.local is None else self.local.shared_weights(validates=validates)

    def _warn(self, text: str) -> None:
        if self.sync.ranks.rank == 0:
            _log.warning("%s", text)

    def adopt(self, earlier: Session) -> None:
        """Continue with the state of an earlier attachment of the same model (a second fit)."""
        self.sync.extend(self._describe_frozen(earlier.sync.specs))
        if self.local is not None and earlier.local is not None:
            self.local.adopt(earlier.local)
        saved = capture.capture(earlier.sync) | {"own": {}}
        capture.restore(self.sync, saved, load_rank=lambda _: saved, on_world_size_change="reset")
        if self.auto is not None:
            self.auto.after_load()

    def _describe_frozen(self, names: Iterable[str]) -> list[TensorSpec]:
        """Those of `names` that are frozen here: their residuals are kept until they are trained again."""
        also = {name for name in names if name in self._frozen}
        return [spec for spec in describe_parameters(self._module, also) if spec.name in also]

    def newly_trainable(self) -> list[str]:
        """Parameters that were frozen when compression was attached and are not any more."""
        return [name for name, param in self._frozen.items() if param.requires_grad]

    def newly_frozen(self) -> list[str]:
        """Parameters that DDP waits for and that are frozen now."""
        return [name for name, param in self._expected.items() if not param.requires_grad]

    def _serve_unfrozen(self) -> None:
        if self.shards or self.trains_locally:
            self.extend()
            return
        raise RuntimeError(
            f"{self.newly_trainable()[0]} was frozen when the model was set up and is trained now, which DDP does not"
            " see: set the model up again after unfreezing, by fabric.setup(module, optimizer) or"
            " accelerator.prepare(module), with the module itself and not with what these returned"
        )

    def extend(self, model: DistributedDataParallel | None = None) -> None:
        """Serve the newly trainable parameters too, between steps, on all ranks together.

        Args:
            model: DDP synchronises what was trainable when it wrapped, and waits for it: the model wrapped anew. Not
                needed for FSDP2.
        """
        names = set(self.newly_trainable())
        self._frozen = {name: param for name, param in self._frozen.items() if name not in names}
        self.sync.extend([spec for spec in describe_parameters(self._module) if spec.name in names])
        if self.local is not None:
            self.local.extend({n: p for n, p in trainable_parameters(self._module).items() if n in names})
        if model is not None and self._hook is not None:
            self._hook.close()
            wiring = self._hook if isinstance(self._hook, DDPWiring) else None
            self._hook = DDPHook(model, self.sync) if wiring is None else wiring.wrapped_anew(model)
            self.close_with(model)
            self._frozen |= {name: self._expected[name] for name in self.newly_frozen()}
            self._expected = trainable_parameters(self._module)
            if self.local is not None:
                self.local.wrapped_by(model)
        if names and self.sync.ranks.rank == 0:
            inform("%d more parameters are trained now\n%s", len(names), build_report(self.sync).render())

    def owns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `optimizer` steps a parameter of this model."""
        return any(id(param) in self._params for group in optimizer.param_groups for param in group["params"])

    def on_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Any optimizer of the process has stepped."""
        if self.owns(optimizer):
            self.sync.optimizer_stepped(optimizer)

    def serves(self, module: nn.Module) -> bool:
        """Whether `module` is this model, whatever wraps it."""
        return any(id(param) in self._params for param in module.parameters())

    def shares_parameters(self, other: Session) -> bool:
        """Whether both are of the same model, set up twice."""
        return not self._params.isdisjoint(other._params)

    def close(self) -> None:
        """End the hook's thread and destroy the process groups made for it; what is saved can still be read.

        A thread that has not ended, as after an error on another rank, may wait in a collective: then groups stay.
        """
        forget_optimizers(self)
        self._let_go_of_model()
        has_ended = self._hook is None or self._hook.close()
        if self.local is not None:
            has_ended = self.local.close() and has_ended
        ranks, self._ranks = self._ranks, None
        if ranks is not None and has_ended:
            ranks.destroy()
            if self.sync.weights is not None:
                self.sync.weights.comm.release(ranks.own)

    def close_with(self, model: DistributedDataParallel) -> None:
        """Close when `model` is gone, in the place of the one it was so far."""
        self._let_go_of_model()
        finalizer = weakref.finalize(model, self.close)
        finalizer.atexit = False
        self._let_go_of_model = finalizer.detach
