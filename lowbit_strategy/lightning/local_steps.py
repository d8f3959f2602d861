"""Local steps under a Trainer, also as one of the replicas that come and go. Independent of the Lightning namespace."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler

from lowbit_strategy.attach.replica import advance_schedule
from lowbit_strategy.attach.session import Session
from lowbit_strategy.lightning.signals import REQUEUE, TERMINATE, DeferredSignals
from lowbit_strategy.rounds.elastic_outer import ElasticOuterSync
from lowbit_strategy.rounds.elastic_sampler import ElasticSampler
from lowbit_strategy.rounds.outer import OuterSync

_MOMENTS = ("on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end")


def averages_weights(callback: Any) -> bool:
    """Whether it is one of Lightning's callbacks that copy the module, or derives from one; of either namespace."""
    names = {base.__name__ for base in type(callback).__mro__}
    return not names.isdisjoint(("StochasticWeightAveraging", "WeightAveraging"))


def add_local_callbacks(trainer: Any, session: Session, signals: DeferredSignals) -> None:
    """Training begins.

    1. The last thing of a fit, before any callback learns that training has ended, is `Session.finish`.
    2. The Trainer looks at the SIGTERM of this rank, or of the ranks that have one model together: to ask all others
       before every batch would make them wait for each other, and hang where one has fewer batches.
    3. Callbacks that average weights see what all ranks share, not what one rank has trained since.
    """
    loop = trainer.fit_loop
    loop.on_run_end = partial(_finish, session, type(loop).on_run_end.__get__(loop))
    loop.epoch_loop._broadcast_sigterm_tensor = partial(_answer_signals, trainer, session, signals)
    for callback in filter(averages_weights, trainer.callbacks):
        for moment in _MOMENTS:
            original = getattr(type(callback), moment).__get__(callback)
            may_change = moment == "on_train_epoch_start"
            setattr(callback, moment, partial(_with_anchors, session, original, may_change))


def _answer_signals(trainer: Any, session: Session, signals: DeferredSignals) -> None:
    sync, outer = session.sync, session.sync.outer
    if isinstance(outer, OuterSync):
        outer.asks = lambda: signals.has_received(REQUEUE)
        if outer.asked:
            outer.asked = False
            signals.run(REQUEUE)
    terminated = signals.terminate_alone() or trainer.received_sigterm
    if sync.ranks.intra_node is not None:
        flag = torch.tensor([int(terminated)], device=sync.device)
        sync.ranks.intra_node.all_reduce_max(flag).wait()
        terminated = bool(flag)
    if terminated:
        raise import_module(type(trainer.fit_loop.epoch_loop).__module__).SIGTERMException  # of either namespace


def _finish(session: Session, on_run_end: Callable[[], Any]) -> Any:
    session.finish()
    return on_run_end()


def _with_anchors(session: Session, moment: Callable[..., Any], may_change: bool, *args: Any, **kwargs: Any) -> None:
    """`may_change`: the callback may give the model the averaged weights, which training then goes on from."""
    with session.shared_weights(validates=False):
        moment(*args, **kwargs)
        if may_change and session.local is not None and session.local.outer is not None:
            session.local.outer.rebase_if_changed()


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """Tensors that stay as they are when the model goes on."""
    return {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def join_in(trainer: Any, replica: ElasticOuterSync, signals: DeferredSignals) -> None:
    """Before the replica meets the others: it follows their steps, its samples are others than theirs, and SIGTERM ends
    it while it waits for them.
    """
    loop = trainer.fit_loop.epoch_loop
    replica.membership.asked_to_end = lambda: trainer.received_sigterm or signals.has_received(TERMINATE)
    replica.membership.end = import_module(type(loop).__module__).SIGTERMException  # of either namespace
    replica.on_healed = lambda: _catch_up(trainer, replica.sync.step_index)
    loaders = tree_leaves(getattr(trainer.train_dataloader, "iterables", trainer.train_dataloader))
    samplers = (getattr(loader, "sampler", None) for loader in loaders)
    replica.data = next((each for each in samplers if isinstance(each, ElasticSampler)), None)


def _catch_up(trainer: Any, steps: int) -> None:
    """The Trainer counts from the others' step, and so do schedules of the learning rate that go by steps."""
    loop = trainer.fit_loop.epoch_loop
    missing = steps - trainer.global_step
    if missing <= 0:
        return
    automatic = trainer.lightning_module.automatic_optimization
    progress = loop.automatic_optimization.optim_progress.optimizer.step if automatic else None
    total = (loop.manual_optimization.optim_step_progress if progress is None else progress).total
    total.ready += missing
    total.completed += missing
    for config in trainer.lr_scheduler_configs:
        if config.interval == "step" and not config.reduce_on_plateau:
            advance_schedule(config.scheduler, missing // config.frequency)


def with_own_samples(dataloader: Any, trainer: Any) -> Any:
    """Lightning's sampler for the ranks of one replica would give every replica the same samples."""
    sampler: Any = getattr(dataloader, "sampler", None)
    if not isinstance(dataloader, DataLoader) or type(sampler) is not DistributedSampler:
        return dataloader
    namespace = type(trainer).__module__.partition(".trainer")[0]
    update = import_module(f"{namespace}.utilities.data")._update_dataloader
    place = {"rank": sampler.rank, "num_ranks": sampler.num_replicas}
    return update(dataloader, ElasticSampler(sampler.dataset, shuffle=sampler.shuffle, seed=sampler.seed, **place))


def batch_size(batch: Any) -> int:
    """Batch size by the first tensor that has dims; 1 if there is none."""
    sizes = (leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())
    return next(sizes, 1)
