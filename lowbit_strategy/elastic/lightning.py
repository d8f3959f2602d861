"""Runs a Trainer as one of several replicas that join and leave. It works in both Lightning namespaces."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler

from lowbit_strategy.attach.session import Session
from lowbit_strategy.elastic.learning_rates import advance_schedule
from lowbit_strategy.elastic.replica import ElasticOuterSync
from lowbit_strategy.elastic.sampler import ElasticSampler
from lowbit_strategy.lightning.signals import TERMINATE, DeferredSignals
from lowbit_strategy.local_steps import lightning as local_steps


def begin(trainer: Any, session: Session, signals: DeferredSignals) -> None:
    """Prepare a Trainer when training begins, before the replica meets the others. It will follow their steps, get its
    own samples, and end on SIGTERM while it waits for them.
    """
    local_steps.begin(trainer, session, signals)
    loop, replica = trainer.fit_loop.epoch_loop, session.replica
    assert isinstance(replica, ElasticOuterSync)
    replica.membership.asked_to_end = lambda: trainer.received_sigterm or signals.has_received(TERMINATE)
    replica.membership.end = import_module(type(loop).__module__).SIGTERMException  # in either namespace
    replica.on_healed = lambda: _catch_up(trainer, replica.sync.step_index)
    loaders = tree_leaves(getattr(trainer.train_dataloader, "iterables", trainer.train_dataloader))
    samplers = (getattr(loader, "sampler", None) for loader in loaders)
    replica.data = next((each for each in samplers if isinstance(each, ElasticSampler)), None)


def _catch_up(trainer: Any, steps: int) -> None:
    """Let the Trainer, and stepwise learning-rate schedules, count from the others' step."""
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
    """Replace Lightning's sampler for one replica's ranks, which would give every replica the same samples."""
    sampler: Any = getattr(dataloader, "sampler", None)
    if not isinstance(dataloader, DataLoader) or type(sampler) is not DistributedSampler:
        return dataloader
    namespace = type(trainer).__module__.partition(".trainer")[0]
    update = import_module(f"{namespace}.utilities.data")._update_dataloader
    place = {"rank": sampler.rank, "num_ranks": sampler.num_replicas}
    return update(dataloader, ElasticSampler(sampler.dataset, shuffle=sampler.shuffle, seed=sampler.seed, **place))
