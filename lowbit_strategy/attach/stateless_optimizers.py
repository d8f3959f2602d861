"""Lets frameworks load an optimizer that has no state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed.checkpoint.state_dict as torch_state_dict
from torch import nn
from torch.optim import Optimizer

_LOAD = "_load_checkpoint"
_REKEY = "_rekey_optimizer_state_if_needed"


@contextlib.contextmanager
def optimizers_without_state(load_checkpoint: Any) -> Iterator[None]:
    """Let `load_checkpoint`, a method of ``ModelParallelStrategy``, load an optimizer that has no state, such as SGD
    without momentum, from one full file.

    Lightning 2.6.6 looks at the first entry of the saved state to see whether its keys are numbers, and torch 2.13
    takes its device from an entry. Both fail if there is none. Such an optimizer needs only its groups' options.
    """
    names = getattr(load_checkpoint.__globals__.get(_LOAD), "__globals__", {})
    if _REKEY not in names:  # a version that works differently
        yield
        return
    rekey, set_state = names[_REKEY], torch_state_dict.set_optimizer_state_dict

    def rekey_if_any(saved: dict[str, Any], module: nn.Module) -> dict[str, Any]:
        return rekey(saved, module) if saved["state"] else saved

    def set_state_if_any(model: nn.Module, optimizer: Optimizer, *, optim_state_dict: Any, **options: Any) -> None:
        if optim_state_dict.get("state", True):
            set_state(model, optimizer, optim_state_dict=optim_state_dict, **options)
            return
        for group, saved in zip(optimizer.param_groups, optim_state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})

    names[_REKEY], torch_state_dict.set_optimizer_state_dict = rekey_if_any, set_state_if_any  # type: ignore[assignment]
    try:
        yield
    finally:
        names[_REKEY], torch_state_dict.set_optimizer_state_dict = rekey, set_state
