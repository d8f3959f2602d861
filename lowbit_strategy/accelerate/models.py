"""The models that an accelerator prepares: ranks agree first, and compression is attached afterwards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any
from weakref import WeakKeyDictionary

from accelerate.utils import DistributedDataParallelKwargs, DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lowbit_strategy.accelerate.prepared_control import AcceleratorLoop
from lowbit_strategy.attach.assembly import warn_of_one_rank
from lowbit_strategy.attach.ddp import attach_ddp, attach_replica
from lowbit_strategy.attach.fsdp import attach_fsdp
from lowbit_strategy.attach.on_module import OnModule
from lowbit_strategy.attach.optimizer_hook import watch_optimizers
from lowbit_strategy.attach.prepare import PreparedModel, prepare
from lowbit_strategy.attach.session import Session
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.control.base import labels
from lowbit_strategy.hooks.bucket_cap import default_bucket_cap_mb
from lowbit_strategy.inform import inform
from lowbit_strategy.methods._base.chooser import Chooser
from lowbit_strategy.model.fingerprint import to_plain
from lowbit_strategy.model.handshake import handshake

_SLOT = "_lowbit_attached"


class PreparedModels:
    """The models that an accelerator has prepared.

    Args:
        loop: The loop that trains them.
        options: The options of all of them.

    Attributes:
        sessions: Sessions of the models in use, in the order in which they were prepared.
        replica: This replica, if replicas come and go; otherwise None.
    """

    def __init__(self, loop: AcceleratorLoop, options: SyncOptions) -> None:
        self.sessions: list[Session] = []
        self.replica: Any = None
        self._loop, self._plugin, self._accelerator, self._options = loop, loop.plugin, loop.accelerator, options
        self._numbers: WeakKeyDictionary[Session, int] = WeakKeyDictionary()  # checkpoints identify models by order
        self._attached: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
        self._warned_of_one_rank = False

    @property
    def attached(self) -> Collection[nn.Module]:
        """The sessions of all models to which compression has been attached, in use or not."""
        return list(self._attached)

    def prepare_model(
        self,
        original: Callable[..., Any],
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> Any:
        prepare_it = functools.partial(original, device_placement=device_placement, evaluation_mode=evaluation_mode)
        trainable = any(param.requires_grad for param in model.parameters())
        if evaluation_mode or _session_of(model) is not None or not trainable:
            self._revive(_session_of(model))
            return prepare_it(model)
        alone = self._accelerator.distributed_type == DistributedType.NO  # one process: a replica, or the only rank
        if alone and self.replica is None:
            if not self._warned_of_one_rank:
                warn_of_one_rank()
            self._warned_of_one_rank = True
            return prepare_it(model)
        if alone:
            self.replica.make_own_group()
        else:
            self._check_ddp_options()
        prepared = self._agree(model, scatter=False)
        # Accelerate would return a model that it has prepared for evaluation unchanged, and nothing would synchronize
        # it.
        vars(model).pop("_is_accelerate_prepared", None)
        wrapped = prepare_it(model)
        module = _inner(wrapped)
        if not alone and not isinstance(module, DistributedDataParallel):
            raise RuntimeError(f"Accelerate made a {type(module).__name__} of the model, not DistributedDataParallel")
        self._attach(attach_replica if alone else attach_ddp, module, prepared)
        return wrapped

    def prepare_fsdp2(self, original: Callable[..., Any], *args: Any) -> Any:
        models = [obj for obj in args if isinstance(obj, nn.Module)]
        known = _session_of(models[0]) if models else None
        if not models or known is not None:
            self._revive(known)
            return original(*args)
        prepared = self._agree(models[0], scatter=True)
        result = original(*args)
        self._attach(attach_fsdp, _inner(next(obj for obj in result if isinstance(obj, nn.Module))), prepared)
        return result

    def _attach(self, attach: Callable[..., Session], module: nn.Module, prepared: PreparedModel) -> None:
        accelerator = self._accelerator
        session = attach(module, prepared, device=accelerator.device, has_scaler=accelerator.scaler is not None)
        earlier = self._take_out(session.module)
        module.__dict__[_SLOT] = OnModule(session)  # lives as long as the module
        self._attached[module] = None
        free = max(self._numbers.values(), default=-1) + 1  # a freed session has no number
        self._numbers[session] = free if earlier is None else self._numbers.pop(earlier)
        session.bind(lambda: accelerator._optimizers, lambda: accelerator.scaler)
        self._loop.control(session.sync, self._numbers[session], alone=not self.sessions)
        if earlier is not None:
            session.adopt(earlier)
            session.resume()
            earlier.close()
        self._revive(session)

    def _take_out(self, module: nn.Module) -> Session | None:
        """Remove and return the session of a model that has been wrapped again."""
        for wrapped in self.attached:
            session = _session_of(wrapped)
            if session in self.sessions and session.module is module:
                del wrapped.__dict__[_SLOT], self._attached[wrapped]
                self.sessions.remove(session)
                return session
        return None

    def _revive(self, session: Session | None) -> None:
        """Note that `session` is in use again: the HF Trainer frees the accelerator's memory, then uses the model."""
        if session is not None and session not in self.sessions:
            watch_optimizers(session)
            self.sessions = sorted([*self.sessions, session], key=lambda each: self._numbers[each])

    def revive_stepped_by(self, optimizer: Optimizer) -> None:
        """Note that the models that `optimizer` steps are in use."""
        for module in self.attached:
            session = _session_of(module)
            if session is not None and session.owns(optimizer):
                self._revive(session)

    def _agree(self, model: nn.Module, *, scatter: bool) -> PreparedModel:
        if self.replica is not None:
            self.replica.check(self._attached)
        prepared = prepare(model, self._plugin.compressor, self._options, scatter=scatter)
        controller = self._plugin.controller
        same = to_plain("controller", controller) | to_plain("monitor", self._plugin.monitor)
        handshake(same | {"gradient_accumulation_steps": self._accelerator.gradient_accumulation_steps})
        if controller is not None and self._accelerator.is_main_process:
            chosen = ", ".join(labels(controller.levels)) or "no compressor"
            inform("%s chooses among: %s", type(controller).__name__, chosen)
        return prepared

    def _check_ddp_options(self) -> None:
        """Give DDP's buckets a size that suits compression, unless the user has set DDP's options."""
        handler = self._accelerator.ddp_handler
        if handler is None and not isinstance(self._plugin.compressor, Chooser):
            cap = default_bucket_cap_mb(self._accelerator.device)
            self._accelerator.ddp_handler = DistributedDataParallelKwargs(bucket_cap_mb=cap)
        hook = getattr(handler, "comm_hook", None)
        if hook is not None and getattr(hook, "value", hook) != "no":
            raise ValueError(
                f"DistributedDataParallelKwargs(comm_hook={hook}) and a compressor cannot both be the communication"
                " hook: leave comm_hook out"
            )


def _inner(model: nn.Module) -> nn.Module:
    """The module inside the wrapper that torch.compile puts around DDP or FSDP2 modules."""
    inner: nn.Module = getattr(model, "_orig_mod", model)
    return inner


def _session_of(model: nn.Module) -> Session | None:
    slot = _inner(model).__dict__.get(_SLOT)
    return slot.session if isinstance(slot, OnModule) else None
