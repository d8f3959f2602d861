"""Switches a model between the engine's communication and the framework's, between steps, on all ranks together."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.hooks.bucket_cap import default_bucket_cap_mb
from lowbit_strategy.hooks.ddp import DDPHook, hooked, renew_reducer
from lowbit_strategy.hooks.fsdp import FSDPHook
from lowbit_strategy.methods.weight_codings import Exact, WeightCoding

_MIB = 1024 * 1024


class DDPSwitch:
    """A DDP model, which uses the engine's communication at first.

    The engine's buckets have the default size unless the user has chosen one; the framework's keep their size.

    Args:
        model: The model, with its hook.
    """

    def __init__(self, model: DistributedDataParallel, sync: GradientSync) -> None:
        self._sync, self._is_taken = sync, True
        self._hook: DDPHook | None = None
        self.rewrapped(model)

    def rewrapped(self, model: DistributedDataParallel) -> None:
        """The framework has wrapped the module, and `model` has a hook now."""
        self.close()
        self._model_of, self._hook = weakref.ref(model), hooked[model]  # the session closes when the model is gone
        self._is_chosen = not model.bucket_bytes_cap_default  # the user has given their size
        self._own_cap_nbytes: int = model.bucket_bytes_cap
        if self._is_taken:
            self.take(None)
        else:
            self.give_back()

    def take(self, weights: WeightCoding | None) -> None:
        """Let the engine reduce gradients. `weights`: how FSDP2's weights are coded."""
        if (model := self._without_hook(default_bucket_cap_mb(self._sync.device) * _MIB)) is not None:
            self._hook, self._is_taken = DDPHook(model, self._sync), True

    def give_back(self) -> None:
        """Return to DDP's communication, without a hook."""
        self._without_hook(self._own_cap_nbytes)
        self._is_taken = False

    def _without_hook(self, cap_nbytes: int) -> DistributedDataParallel | None:
        self.close()
        model = self._model_of()
        if model is not None:
            if not self._is_chosen:
                _set_bucket_cap(model, cap_nbytes)
            renew_reducer(model)
        return model

    def close(self) -> bool:
        """End threads. Return True once they have stopped."""
        hook, self._hook = self._hook, None
        return hook is None or hook.close()


def _set_bucket_cap(model: Any, nbytes: int) -> None:
    first = min(nbytes, torch.distributed._DEFAULT_FIRST_BUCKET_BYTES)
    model.bucket_bytes_cap = nbytes
    if hasattr(model, "_bucket_config"):  # torch 2.13 and later
        model._bucket_config = dataclasses.replace(
            model._bucket_config, bucket_bytes_cap=nbytes, first_bucket_bytes_cap=first
        )


class FSDPSwitch:
    """A model that FSDP2 shards, which uses the engine's communication at first.

    Args:
        hook: The model's hook.
        weights: How it codes weights.
    """

    def __init__(self, hook: FSDPHook, sync: GradientSync, weights: WeightCoding | None) -> None:
        self._hook, self._sync = hook, sync
        self._taken = weights

    def take(self, weights: WeightCoding | None) -> None:
        """Let the engine reduce gradients, and send weights as `weights` codes them."""
        weights = weights or Exact()
        if weights == self._taken:
            return
        if self._taken is not None:
            self.give_back()
        self._hook.install(weights)
        self._taken = weights

    def give_back(self) -> None:
        """Return to FSDP2's communication."""
        if self._taken is not None and (served := self._sync.weights) is not None:
            served.invalidate()
            for comm in served.comms:
                comm.end()
        self._taken = None
        self._hook.restore()

    def close(self) -> bool:
        """Return True: the session closes the hook."""
        return True
