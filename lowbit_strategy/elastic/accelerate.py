"""An accelerator as one of the replicas that join and leave: its group, its samples, the others' steps."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from lowbit_strategy.attach.session import Session
from lowbit_strategy.elastic import transformers
from lowbit_strategy.elastic.sampler import ElasticSampler

_log = logging.getLogger("lowbit_strategy")


class ReplicaBinding:
    """Called by the binding at an accelerator's moments, where replicas come and go.

    Args:
        sessions: Gives the models in use.
        seed: Seed of the permutations of samples; the same on all replicas.

    Attributes:
        on_healed: Called when this replica has got the others' state, with the number of optimizer steps that the run
            has taken.
    """

    def __init__(self, sessions: Callable[[], Iterable[Session]], seed: int) -> None:
        self._sessions = sessions
        self._seed = seed
        self._sampler: ElasticSampler | None = None
        self._batch_size = 1
        self.on_healed: Callable[[int], Any] = _log_steps

    def with_own_samples(self, loader: Any) -> Any:
        """Instead of a loader that is about to be prepared: if it shuffles, replicas get different samples.

        Accelerate divides a replica's samples among its ranks.
        """
        sampler = getattr(loader, "sampler", None)
        if not isinstance(loader, DataLoader) or not isinstance(sampler, RandomSampler):
            return loader
        if type(loader) is not DataLoader or type(loader.batch_sampler) is not BatchSampler or sampler.replacement:
            _log.warning(
                "lowbit_strategy: elastic leaves this %s as it is: see to it that replicas have different samples",
                type(loader).__name__,
            )
            return loader
        self._sampler = ElasticSampler(loader.dataset, seed=self._seed)
        self._sampler.on_begin = self.join
        self._batch_size = loader.batch_size or 1
        for session in self._sessions():
            self.attach(session)
        replaced = ("sampler", "batch_sampler", "shuffle")
        kept = [name for name in inspect.signature(DataLoader).parameters if name not in replaced]
        return DataLoader(**{name: getattr(loader, name) for name in kept}, sampler=self._sampler)

    def check(self, models: Collection[Any]) -> None:
        """A model is about to be prepared.

        Raises:
            ValueError: There is one already.
        """
        if models:
            raise ValueError("elastic serves one model per Accelerator: give a second one its own Accelerator")

    def make_own_group(self) -> None:
        """A process group of this process alone, for the comparisons and checkpoints that take all ranks."""
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def attach(self, session: Session) -> None:
        """A model has been prepared."""
        replica = session.replica
        replica.data = self._sampler
        replica.on_healed = lambda: self.on_healed(replica.sync.step_index)

    def join(self) -> None:
        """Meet the others, if this replica has not yet: before the first sample is drawn."""
        for session in self._sessions():
            if session.replica is not None and not session.replica.has_joined:
                session.resume()

    def count_samples(self) -> None:
        """Counts the samples of one batch, before its backward pass."""
        for session in self._sessions():
            if session.replica is not None:
                session.replica.count_samples(self._batch_size)

    @property
    def leads(self) -> bool:
        """Whether this replica is the first one, which writes checkpoints."""
        return all(session.pace.writes_checkpoints for session in self._sessions())

    def adapt_trainer(self, trainer: Any, binding_of: Callable[[Any], Any]) -> None:
        """A Hugging Face Trainer is made."""
        transformers.adapt(trainer, binding_of)

    def begin_training(self, trainer: Any) -> None:
        """A Hugging Face Trainer begins."""
        self.on_healed = functools.partial(transformers.catch_up, trainer)


def _log_steps(steps: int) -> None:
    if steps == 0:
        return
    _log.warning(
        "lowbit_strategy: this replica goes on where the others are, after optimizer step %d: let your loop go by"
        " accelerator.lowbit.sync.step_index, and bring schedules there in accelerator.lowbit.replica.on_healed",
        steps,
    )
