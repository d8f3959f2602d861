"""DDP and FSDP2 with compressed gradients, under Fabric."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lowbit_strategy.attach.constructors import DDPConstructor, FSDPConstructor, LowBitStrategy
from lowbit_strategy.attach.ddp import attach_ddp
from lowbit_strategy.attach.fsdp import attach_fsdp
from lowbit_strategy.attach.on_module import OnModule
from lowbit_strategy.attach.prepare import prepare
from lowbit_strategy.attach.session import CHECKPOINT_KEY, Session
from lowbit_strategy.checkpoint import residual_files
from lowbit_strategy.checkpoint.residual_files import Stamp
from lowbit_strategy.model.sharded import reshard

from .stock import DDPStrategy, ModelParallelStrategy, ParallelStrategy

_SLOT = "_lowbit_fabric_session"


class SessionsStrategy(LowBitStrategy, ParallelStrategy):
    """A strategy with one `Session` for each model that is set up."""

    def on_configured(self) -> None:
        self._sessions: list[weakref.ref[Session]] = []  # held by their modules
        self._optimizers: list[weakref.ref[Any]] = []

    @property
    def sessions(self) -> list[Session]:
        """The open sessions; others have closed with their DDP wrappers."""
        return [each for each in self._known_sessions() if not each.is_closed]

    def _known_sessions(self) -> list[Session]:
        return [session for each in self._sessions if (session := each()) is not None]

    def attach(self, session: Session) -> None:
        """Take over a new session, which replaces an earlier one of the same module."""
        session.bind(
            lambda: [optimizer for each in self._optimizers if (optimizer := each()) is not None],
            lambda: self.loss_scaler,
        )
        known = self._known_sessions()
        earlier = next((each for each in known if each.module is session.module), None)
        if earlier is None:
            known = [*self.sessions, session]
        else:
            session.adopt(earlier)
            session.resume()
            earlier.close()
            known[known.index(earlier)] = session
        self._sessions = list(map(weakref.ref, known))
        vars(session.module)[_SLOT] = OnModule(session)

    def backward(self, tensor: torch.Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        for session in self.sessions:
            is_its_own = module is None or session.serves(module)
            session.begin_step(self.loss_scaler, loss=tensor.detach() if is_its_own else None)
        super().backward(tensor, module, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, **kwargs)
        for session in self.sessions:
            if session.owns(optimizer):
                session.end_step(optimizer, self.loss_scaler)
        return output

    def clip_gradients_norm(self, module: Any, optimizer: Any, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
        self._clipped(module, max_norm, "max_norm")
        return super().clip_gradients_norm(module, optimizer, max_norm, *args, **kwargs)

    def clip_gradients_value(self, module: Any, optimizer: Any, clip_val: Any, *args: Any, **kwargs: Any) -> Any:
        self._clipped(module, clip_val, "clip_val")
        return super().clip_gradients_value(module, optimizer, clip_val, *args, **kwargs)

    def _clipped(self, module: nn.Module, clip: float, option: str) -> None:
        for session in self.sessions:
            if session.serves(module):
                session.clipped(clip, option)

    def setup_optimizer(self, optimizer: Any) -> Any:
        self._take_optimizer(optimizer)
        return super().setup_optimizer(optimizer)

    def _take_optimizer(self, optimizer: Any) -> None:
        """Note that an optimizer is set up."""
        self.options.check_optimizers(self.compressor, [optimizer])
        self._optimizers.append(weakref.ref(optimizer))

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        sessions = self._sessions_of(state)
        with contextlib.ExitStack() as saving:
            stamps = [saving.enter_context(each.save(self._sidecar_path(path, i))) for i, each in enumerate(sessions)]
            self.barrier()  # all ranks call fabric.save: no checkpoint lacks a rank's residuals
            for session in sessions:
                saving.enter_context(session.shared_weights(validates=False))
            super().save_checkpoint(path, {**state, CHECKPOINT_KEY: stamps}, *args, **kwargs)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        remainder = super().load_checkpoint(path, state, *args, **kwargs)
        if isinstance(state, (nn.Module, torch.optim.Optimizer)):
            return remainder  # only weights
        stamps: list[Stamp] | None = remainder.pop(CHECKPOINT_KEY, None)
        for i, session in enumerate(self._sessions_of(state or {})):
            stamp = stamps[i] if stamps is not None and i < len(stamps) else None
            session.load(self._sidecar_path(path, i), stamp)
            session.resume()
        return remainder

    def _sessions_of(self, state: dict[str, Any]) -> list[Session]:
        """The sessions of the models in `state`; all sessions if it has state dicts instead of modules."""
        if not (modules := [value for value in state.values() if isinstance(value, nn.Module)]):
            return self.sessions
        return [each for each in self.sessions if any(each.serves(module) for module in modules)]

    @staticmethod
    def _sidecar_path(path: Any, index: int) -> str:
        """The path of a model's residual files: next to the checkpoint for the first model; for a second one (a GAN's
        critic) inside the first one's folder, which no other checkpoint uses.
        """
        return str(path) if index == 0 else f"{residual_files.sidecar_folder(path)}/model_{index}"


class LowBitDDPStrategy(SessionsStrategy, DDPConstructor, DDPStrategy):
    """DDP with compressed gradient synchronization. With one rank nothing is compressed.

    Args:
        compressor: A configuration such as ``LoCo(bits=4)``, the default, or a preset's name such as ``"loco2"``.
        kwargs: Fields of `SyncOptions`, and arguments of ``DDPStrategy`` except its hooks.

    Raises:
        TypeError: An option is unknown.
        ValueError: An option is out of range, or a communication hook is given.
    """

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap the module, then attach, because Fabric's DDP has no option for hooks."""
        if not any(param.requires_grad for param in module.parameters()):
            return super().setup_module(module)  # inference only: DDP's error says that it is not needed
        prepared = prepare(module, self.compressor, self.options, scatter=False)
        self.choose_buckets(self.root_device)
        wrapped = super().setup_module(module)
        self.attach(self._attached(attach_ddp, wrapped, prepared))
        return wrapped


class LowBitFSDPStrategy(SessionsStrategy, FSDPConstructor, ModelParallelStrategy):
    """FSDP2 with a compressed gradient reduce-scatter, for any module. With one rank nothing is compressed.

    Args:
        compressor: A configuration such as ``LoCo(bits=4)``, the default, or a preset's name such as ``"loco2"``.
        min_shard_numel, mp_policy, accumulate, save_distributed_checkpoint, process_group_backend, timeout: See
            `FSDPConstructor`.
        options: Those of `SyncOptions`.

    Raises:
        TypeError: An option is unknown, or one of FSDP1 (the message names what to do instead).
        ValueError: An option is out of range.
    """

    def stock_options(self) -> dict[str, Any]:
        return {"parallelize_fn": self._parallelize}

    def _parallelize(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        if self.parallelize_fn is not None:
            module = self.parallelize_fn(module, device_mesh)
        return self.shard(module, device_mesh, self.precision)

    def on_configured(self) -> None:
        super().on_configured()
        if self.accumulate == "reduce":
            self._backward_sync_control = self  # type: ignore[assignment]

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        """A context that replaces Fabric's own, with which every micro-batch would be reduced."""
        yield
        for session in self.sessions:
            if enabled and session.serves(module):  # no optimizer steps on these gradients
                session.weights_unchanged()

    def setup_module(self, module: nn.Module) -> nn.Module:
        if not any(param.requires_grad for param in module.parameters()):
            return super().setup_module(module)
        prepared = prepare(module, self.compressor, self.options, scatter=True)
        wrapped = super().setup_module(module)
        self.attach(self._attached(attach_fsdp, wrapped, prepared))
        return wrapped

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None) -> Any:
        """Shard the module, which replaces parameters, and point the existing optimizers to the new parameters by name.

        Raises:
            ValueError: An optimizer already has state, which belongs to the unsharded parameters.
        """
        names = {id(param): name for name, param in module.named_parameters()}
        wrapped = self.setup_module(module)
        sharded = dict(module.named_parameters())
        for optimizer in optimizers:
            if optimizer.state:
                raise ValueError("set the model and optimizer up before the first step: this optimizer has state")
            self._take_optimizer(optimizer)
            for group in optimizer.param_groups:
                group["params"] = [sharded[names[id(param)]] for param in group["params"]]
        return wrapped, optimizers, scheduler

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        _reshard(state)
        return super().load_checkpoint(path, state, *args, **kwargs)

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        _reshard(state)
        # all ranks write to rank 0's path, as in the stock strategy; so do residuals
        super().save_checkpoint(self.broadcast(path), state, *args, **kwargs)


def _reshard(state: Any) -> None:
    """Reshard the models of a state, since a validation leaves the outermost module gathered."""
    for value in state.values() if isinstance(state, dict) else [state]:
        if isinstance(value, nn.Module):
            reshard(value)
