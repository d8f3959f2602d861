"""One call for a training loop in plain PyTorch."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lowbit_strategy.attach.attach import attach_ddp, attach_fsdp
from lowbit_strategy.attach.checks import MADE_BEFORE_SHARDING, check_optimizers
from lowbit_strategy.attach.prepare import prepare
from lowbit_strategy.attach.session import Session
from lowbit_strategy.attach.strategy_options import SyncOptions
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.registry import as_compressor
from lowbit_strategy.model.fsdp_sharding import sharded_groups
from lowbit_strategy.model.parameters import trainable_parameters


def compress(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    compressor: Compressor | str | None = None,
    *,
    scaler: Any = None,
    **options: Any,
) -> Session:
    """Compress the gradient synchronization of a model in a loop that uses no framework. Call on all ranks.

    1. the ranks compare model, options and versions, and compression is attached
    2. a backward pass begins a step: what ``begin_step`` of the session does
    3. a step of `optimizer` ends it: what ``end_step`` of the session does

    Args:
        model: In ``DistributedDataParallel``, or sharded with ``fully_shard``.
        optimizer: All that step parameters of `model`, made after sharding.
        compressor: A configuration or a preset's name; None: ``LoCo()``.
        scaler: The ``GradScaler``, if there is one.
        options: Those of `SyncOptions`.

    Returns:
        The session: ``save`` and ``load`` go around checkpoints, ``finish`` comes after training, ``shared_weights``
        goes around validation where steps are local.

    Raises:
        TypeError: An option is unknown.
        ValueError: `model` is neither wrapped nor sharded, an optimizer steps none of its parameters, or what was
            chosen does not go together.
        RuntimeError: The ranks differ.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    is_ddp = isinstance(model, DistributedDataParallel)
    if not is_ddp and not sharded_groups(model):
        raise ValueError(
            f"compress was given a {type(model).__name__} that nothing synchronizes: give it what"
            " DistributedDataParallel returned, or a module that was sharded with fully_shard"
        )
    sync_options = SyncOptions(**options)
    if sync_options.elastic is not None:
        raise ValueError("compress serves ranks that stay: for elastic call prepare and attach_replica")
    compressor = LoCo() if compressor is None else as_compressor(compressor)
    check_optimizers(compressor, sync_options, optimizers)
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    params = {id(param) for param in bare.parameters()}
    if any(not params & {id(p) for group in each.param_groups for p in group["params"]} for each in optimizers):
        raise ValueError(MADE_BEFORE_SHARDING)
    prepared = prepare(bare, compressor, sync_options, scatter=not is_ddp)
    attach: Any = attach_ddp if is_ddp else attach_fsdp
    session: Session = attach(model, prepared, has_scaler=scaler is not None)
    session.bind(lambda: optimizers, lambda: scaler)
    session.ended_by.update(optimizers)
    _begin_with_backward(model, session, scaler)
    session.resume()
    return session


def _begin_with_backward(model: nn.Module, session: Session, scaler: Any) -> None:
    """Begin a step where a backward pass reaches what a forward pass of a synchronized module returned or, if DDP
    returned no tensors, a parameter, before its gradient is added. Gradients may be cleared up to that moment.
    """
    reference = weakref.ref(session)
    last_pass: list[int] = []
    watched: list[Any] = []

    def begin() -> None:
        current = torch._C._current_graph_task_id()  # several forward passes may be of one backward pass
        session = reference()
        if session is not None and not session.is_closed and last_pass != [current]:
            last_pass[:] = [current]
            session.begin_step(scaler)

    @torch.compiler.disable
    def after_forward(module: nn.Module, _: Any, output: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if tensors:
            register_multi_grad_hook(tensors, lambda _: begin(), mode="any")
        elif isinstance(module, DistributedDataParallel) and torch.is_grad_enabled() and not watched:
            # not for every model: each hook would wait until the thread that reduces buckets lets Python go
            for param in trainable_parameters(module.module).values():
                node: Any = param.expand_as(param).grad_fn
                watched.append(node.next_functions[0][0].register_prehook(lambda _: begin()))

    model.register_forward_hook(after_forward)
    if not isinstance(model, DistributedDataParallel):
        for sharded in (each for each in model.modules() if isinstance(each, FSDPModule) and each is not model):
            sharded.register_forward_hook(after_forward)
