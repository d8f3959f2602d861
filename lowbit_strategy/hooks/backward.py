"""Calls a function in every backward pass of a synchronized model, however the loss was computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.engine.backward_pass import NO_PASS, current_pass
from lowbit_strategy.model.parameters import trainable_parameters
from lowbit_strategy.model.sharded import sharded_groups


def before_backward(model: nn.Module, call: Callable[[], None]) -> None:
    """Call `call` once in every backward pass, before the first gradient of a parameter is added to ``.grad``.

    Under DDP this happens where autograd adds gradients to parameters, under FSDP2 where a module is gathered for
    backward. It replaces an earlier `call` for the same FSDP2 model.

    Args:
        model: The model, sharded or wrapped in ``DistributedDataParallel``, which keeps the nodes that accumulate
            gradients.
        call: The function to call, in the thread that computes gradients.
    """
    once = _OncePerPass(call)
    if isinstance(model, DistributedDataParallel):
        for param in trainable_parameters(model.module).values():
            with torch.inference_mode(False):  # gradients may be off during set-up
                node: Any = param.expand_as(param).grad_fn
            node.next_functions[0][0].register_prehook(once)
        return
    for each in sharded_groups(model):
        group = each.param_group
        earlier = vars(group).get("pre_backward", group.pre_backward)
        group.pre_backward = _PreBackward(once, earlier.stock if isinstance(earlier, _PreBackward) else earlier)


class _OncePerPass:
    """Calls `call` when it is first called in a backward pass."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call, self._last_pass = call, NO_PASS

    def __call__(self, *_: Any) -> None:
        current = current_pass()  # a nested pass has a higher number
        if current > self._last_pass:
            self._last_pass = current
            self._call()


@dataclass(slots=True)
class _PreBackward:
    """The ``pre_backward`` of one of FSDP2's groups, after `first`."""

    first: Callable[[], None]
    stock: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        self.first()
        return self.stock(*arguments)
