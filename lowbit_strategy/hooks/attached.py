"""Compression at work on one model: what a framework's adapter calls once `attach_ddp` or `attach_fsdp` has made it."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.checkpoint import capture
from lowbit_strategy.checkpoint.residual_files import ResidualFileError
from lowbit_strategy.checkpoint.resume import resume
from lowbit_strategy.checkpoint.save import SavedResiduals, save_residuals
from lowbit_strategy.checkpoint.stamp import Stamp, agree_on_stamp
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.hooks.ddp import DDPHook
from lowbit_strategy.hooks.digest import ParameterDigest
from lowbit_strategy.hooks.local_steps import LocalSteps
from lowbit_strategy.hooks.sync_options import SyncOptions
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.model.parameters import canonical_name, describe_parameters, trainable_parameters
from lowbit_strategy.ranks.ranks import Ranks
from lowbit_strategy.telemetry.startup_report import build_report

CHECKPOINT_KEY = "lowbit_strategy"

_log = logging.getLogger("lowbit_strategy")


class Hook(Protocol):
    """What feeds the engine beside training."""

    def close(self) -> bool:
        """End its thread. Returns whether nothing of it runs any more."""


class Attached:
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
    ) -> None:
        self.sync = sync
        self.options = options
        self.group = group
        self.local = local
        self._ranks = ranks
        self._digest = digest
        self._finalizer: weakref.finalize[[], DistributedDataParallel] | None = None
        self._module = module
        self._hook = hook
        self._warned = False
        self._has_scale = False
        self._params = {id(param) for param in module.parameters()}
        self._frozen = {canonical_name(n): param for n, param in module.named_parameters() if not param.requires_grad}

    @property
    def trains_locally(self) -> bool:
        """Whether gradients stay on this rank; False in the synchronous part of a rule that has one."""
        return self.local is not None and self.local.outer is not None

    def set_loss_scale(self, scaler: Any) -> None:
        """Before backward: take over what the coming gradients are multiplied by (None: nothing).

        The step begins here, on the thread and stream of training: controllers decide, parameters are regrouped. The
        scaler is read before the first backward pass of a step, and not at all where `follow_scaler` has read it.
        """
        if self.trains_locally:
            return
        if not (self._has_scale or self.sync.has_begun):
            self.follow_scaler(scaler)
        self._has_scale = False  # it holds for the step that begins
        if self.sync.ranks.peers.world_size > 1:
            self.sync.begin_step()

    def follow_scaler(self, scaler: Any) -> None:
        """After ``scaler.update()``, before `end_step`: the scale changes there alone, and reading it before backward
        would make the host wait for the device.
        """
        if scaler is not None and scaler.is_enabled() and not self.trains_locally:
            self._has_scale = True
            self.sync.set_loss_scale(float(scaler.get_scale()))

    def end_step(self, optimizer: torch.optim.Optimizer | None = None) -> bool:
        """After every optimizer step, skipped ones too. Returns whether the step counted.

        Args:
            optimizer: Which one has stepped, for local steps; None: the only one.

        Raises:
            DivergenceError: On every rank, if parameters were compared after this step and differ.
        """
        if self.trains_locally:
            assert self.local is not None
            self.local.after_optimizer(optimizer)
            return True
        comm = self.sync.ranks.peers
        if not self._warned and comm.sent_nbytes == 0 and comm.world_size > 1:
            self._warned = True
            _log.warning("rank %d: %s", self.sync.ranks.rank, self._why_nothing_was_sent())
        synchronised = self.sync.in_step
        counted = self.sync.end_step()
        if self._digest is not None and synchronised and counted:
            self._digest.after_step(self.sync.step_index)
        if self.local is not None and synchronised:
            self.local.after_optimizer(optimizer)
        return counted

    def _why_nothing_was_sent(self) -> str:
        params = [
            (canonical_name(name), param) for name, param in self._module.named_parameters() if param.requires_grad
        ]
        idle = [name for name, param in params if param.grad is None]
        if isinstance(self._hook, DDPHook) and 0 < len(idle) < len(params):
            more = " ..." if len(idle) > 3 else ""
            return (
                f"the loss does not depend on {', '.join(idle[:3])}{more}, and DDP waits for all gradients before it"
                " synchronises: pass find_unused_parameters=True (or a name like loco_ddp_find_unused_parameters_true)"
            )
        return (
            "the optimizer has stepped but no gradient has been synchronised yet. If the first loss was not skipped on"
            " purpose, backward does not reach what was set up"
        )

    def save(self, path: Any) -> SavedResiduals:
        """Write this rank's residuals beside the checkpoint `path`; call on all ranks *before* the checkpoint.

        When it returns, all ranks have written theirs. Its ``stamp`` goes into the checkpoint, under `CHECKPOINT_KEY`;
        its ``remove_replaced`` is to be called when the checkpoint is complete.

        Raises:
            ResidualFileError: On every rank, if one of them cannot write its file.
        """
        if self.local is not None:
            self.local.arrive()
        return save_residuals(self.sync, path, group=self.group)

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

    def weights_changed(self) -> None:
        """Weights were changed within a step other than by an optimizer of ``torch.optim``: the next gather sends them.

        Call on all ranks. Not needed between steps.
        """
        if self.sync.weights is not None:
            self.sync.weights.invalidate()

    def resume(self) -> None:
        """The framework has loaded all that it saves, after `load`, or training begins; for local steps."""
        if self.local is not None:
            self.local.resume()

    def finish(self) -> None:
        """Training ends on this rank; call on all ranks. After local steps all ranks have the same weights then."""
        if self.local is not None:
            self.local.finish()

    def anchored(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the model has what all ranks share, and not this rank's own weights: to validate, to save."""
        return contextlib.nullcontext() if self.local is None else self.local.anchored()

    def _warn(self, text: str) -> None:
        if self.sync.ranks.rank == 0:
            _log.warning("%s", text)

    def adopt(self, earlier: Attached) -> None:
        """Continue with the state of an earlier attachment of the same model (a second fit)."""
        self.sync.extend(self._describe_frozen(earlier.sync.specs))
        if self.local is not None and earlier.local is not None:
            self.local.adopt(earlier.local)
        saved = capture.capture(earlier.sync) | {"own": {}}
        capture.restore(self.sync, saved, load_rank=lambda _: saved, on_world_size_change="reset")

    def _describe_frozen(self, names: Iterable[str]) -> list[TensorSpec]:
        """Those of `names` that are frozen here: their residuals are kept until they are trained again."""
        also = {name for name in names if name in self._frozen}
        return [spec for spec in describe_parameters(self._module, also) if spec.name in also]

    def newly_trainable(self) -> list[str]:
        """Parameters that were frozen when compression was attached and are not any more."""
        return [name for name, param in self._frozen.items() if param.requires_grad]

    def cover(self, model: DistributedDataParallel | None = None) -> None:
        """Serve the newly trainable parameters too, between steps, on all ranks together.

        Args:
            model: DDP synchronises what was trainable when it wrapped: the model wrapped anew. Not needed for FSDP2.
        """
        names = set(self.newly_trainable())
        self._frozen = {name: param for name, param in self._frozen.items() if name not in names}
        self.sync.extend([spec for spec in describe_parameters(self._module) if spec.name in names])
        if self.local is not None:
            self.local.extend({n: p for n, p in trainable_parameters(self._module).items() if n in names})
        if model is not None and self._hook is not None:
            self._hook.close()
            self._hook = DDPHook(model, self.sync)
            self.close_with(model)
        if self.sync.ranks.rank == 0:
            _log.info("%d more parameters are trained now\n%s", len(names), build_report(self.sync).render())

    def owns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `optimizer` steps a parameter of this model."""
        return any(id(param) in self._params for group in optimizer.param_groups for param in group["params"])

    def serves(self, module: nn.Module) -> bool:
        """Whether `module` is this model, whatever wraps it."""
        return any(id(param) in self._params for param in module.parameters())

    def shares_parameters(self, other: Attached) -> bool:
        """Whether both are of the same model, set up twice."""
        return not self._params.isdisjoint(other._params)

    def close(self) -> None:
        """End the hook's thread and destroy the process groups made for it; what is saved can still be read.

        If the thread has not ended, as after an error on another rank, it may still wait in a collective: then the
        groups stay.
        """
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
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = weakref.finalize(model, self.close)
        self._finalizer.atexit = False
