"""What both Fabric strategies share: steps, loss scale, checkpoints. Independent of the Fabric namespace."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import nn

from lowbit_strategy.attach.optimizer_checks import ClippingWarning, check_optimizers
from lowbit_strategy.attach.session import CHECKPOINT_KEY, Session
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.checkpoint import residual_files
from lowbit_strategy.checkpoint.all_ranks import Stamp
from lowbit_strategy.fabric.bases import ParallelStrategy
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.telemetry.model_control import ModelControl


class LowBitFabricMixin(ParallelStrategy):
    """Put before a constructor and a Fabric strategy in the bases of a class.

    There is one attachment per model that is set up.
    """

    compressor: Compressor
    options: SyncOptions
    sessions: list[Session]

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: `lowbit_strategy.register` does it, for both kinds."""

    def on_configured(self) -> None:
        self.sessions = []
        self._clipping: ClippingWarning | None = None
        self._optimizers: list[weakref.ref[Any]] = []

    @property
    def loss_scaler(self) -> Any:
        return getattr(self.precision, "scaler", None)

    def attach(self, session: Session) -> None:
        """Take over a new attachment, in the place of an earlier one of the same module if there is one."""
        session.bind(
            lambda: [optimizer for each in self._optimizers if (optimizer := each()) is not None],
            lambda: self.loss_scaler,
        )
        for index, earlier in enumerate(self.sessions):
            if earlier.param_ids & session.param_ids:
                session.adopt(earlier)
                session.resume()
                earlier.close()
                self.sessions[index] = session
                return
        self.sessions.append(session)

    def backward(self, tensor: torch.Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        for session in self.sessions:
            session.begin_step(self.loss_scaler, loss=tensor.detach())
            if (control := ModelControl.of(session.sync)) is not None and (module is None or session.serves(module)):
                control.loss = tensor.detach()
        super().backward(tensor, module, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, **kwargs)
        for session in self.sessions:
            if session.owns(optimizer):
                session.end_step(optimizer, self.loss_scaler)
        return output

    def clip_gradients_norm(self, module: Any, optimizer: Any, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
        self._clipped(max_norm, "max_norm")
        return super().clip_gradients_norm(module, optimizer, max_norm, *args, **kwargs)

    def clip_gradients_value(self, module: Any, optimizer: Any, clip_val: Any, *args: Any, **kwargs: Any) -> Any:
        self._clipped(clip_val, "clip_val")
        return super().clip_gradients_value(module, optimizer, clip_val, *args, **kwargs)

    def _clipped(self, clip: float, option: str) -> None:
        if self._clipping is None:  # the rank is not known before the strategy is set up
            self._clipping = ClippingWarning(self.compressor, speaks=self.global_rank == 0)
        self._clipping.clipped(clip, option)

    def setup_optimizer(self, optimizer: Any) -> Any:
        check_optimizers(self.compressor, self.options, [optimizer])
        self._optimizers.append(weakref.ref(optimizer))
        return super().setup_optimizer(optimizer)

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        path = self.broadcast(path)
        sessions = self._sessions_of(state)
        with contextlib.ExitStack() as saving:
            stamps = [saving.enter_context(each.save(self._sidecar_path(path, i))) for i, each in enumerate(sessions)]
            for session in sessions:
                saving.enter_context(session.shared_weights(validates=False))
            super().save_checkpoint(path, {**state, CHECKPOINT_KEY: stamps}, *args, **kwargs)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        remainder = super().load_checkpoint(path, state, *args, **kwargs)
        if isinstance(state, (nn.Module, torch.optim.Optimizer)):
            return remainder  # the weights alone
        stamps: list[Stamp] | None = remainder.pop(CHECKPOINT_KEY, None)
        for i, session in enumerate(self._sessions_of(state or {})):
            stamp = stamps[i] if stamps is not None and i < len(stamps) else None
            session.load(self._sidecar_path(path, i), stamp)
            session.resume()
        return remainder

    def _sessions_of(self, state: dict[str, Any]) -> list[Session]:
        """Of the models in `state`; all of them if it has none (state dicts instead of modules)."""
        if not (modules := [value for value in state.values() if isinstance(value, nn.Module)]):
            return self.sessions
        return [each for each in self.sessions if any(each.serves(module) for module in modules)]

    @staticmethod
    def _sidecar_path(path: Any, index: int) -> str:
        """Where a model's residual files lie: those of the first one at the checkpoint's own name, those of a second
        one (a GAN's critic) inside of the first one's folder, where no checkpoint of the user's has its own.
        """
        return str(path) if index == 0 else f"{residual_files.sidecar_folder(path)}/model_{index}"
