"""Runs an accelerator as one of several replicas that join and leave: its group, its samples, the others' steps."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Collection
from typing import Any

import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from lowbit_strategy.accelerate.binding import Binding, wrap_method
from lowbit_strategy.elastic import transformers
from lowbit_strategy.elastic.sampler import ElasticSampler

_log = logging.getLogger("lowbit_strategy")


class ReplicaBinding:
    """The part of a binding for replicas that come and go. It wraps more of the accelerator's methods:

    | wrapped method | added behavior |
    |---|---|
    | `prepare_data_loader` | each replica gets its own samples |
    | `prepare_model`, `_prepare_fsdp2` | gives the data to the model's replica |
    | `backward` | samples are counted first |

    Args:
        binding: The accelerator's binding.

    Attributes:
        on_healed: Called when this replica has received the others' state, with the run's number of optimizer steps.
    """

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._sampler: ElasticSampler | None = None
        self._batch_size = 1
        self.on_healed: Callable[[int], Any] = _log_steps
        wrap_method(binding.accelerator, "prepare_data_loader", self._prepare_data_loader)
        for name in ("prepare_model", "_prepare_fsdp2"):
            wrap_method(binding.accelerator, name, self._prepare_model)
        wrap_method(binding.accelerator, "backward", self._backward)

    def _prepare_data_loader(self, original: Callable[..., Any], loader: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self._with_own_samples(loader), *args, **kwargs)

    def _prepare_model(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        prepared = original(*args, **kwargs)
        self._attach()
        return prepared

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for session in self._binding.sessions:
            if session.replica is not None:
                session.replica.count_samples(self._batch_size)
        return original(*args, **kwargs)

    def _attach(self) -> None:
        for session in self._binding.sessions:
            if (replica := session.replica) is not None:
                replica.data = self._sampler
                replica.on_healed = functools.partial(self._healed, replica)

    def _healed(self, replica: Any) -> None:
        self.on_healed(replica.sync.step_index)

    def _with_own_samples(self, loader: Any) -> Any:
        """Replace a loader that is about to be prepared: if it shuffles, replicas get different samples.

        Accelerate divides a replica's samples among its ranks.
        """
        sampler = getattr(loader, "sampler", None)
        if not isinstance(loader, DataLoader) or not isinstance(sampler, RandomSampler):
            return loader
        if type(loader) is not DataLoader or type(loader.batch_sampler) is not BatchSampler or sampler.replacement:
            _log.warning(
                "lowbit_strategy: elastic leaves this %s unchanged: make sure that replicas have different samples",
                type(loader).__name__,
            )
            return loader
        self._sampler = ElasticSampler(loader.dataset, seed=self._binding.plugin.seed)
        self._sampler.on_begin = self.join
        self._batch_size = loader.batch_size or 1
        self._attach()
        replaced = ("sampler", "batch_sampler", "shuffle")
        kept = [name for name in inspect.signature(DataLoader).parameters if name not in replaced]
        return DataLoader(**{name: getattr(loader, name) for name in kept}, sampler=self._sampler)

    def check(self, models: Collection[Any]) -> None:
        """Check models that are about to be prepared.

        Raises:
            ValueError: There already is one.
        """
        if models:
            raise ValueError("elastic supports one model per Accelerator: give a second one its own Accelerator")

    def make_own_group(self) -> None:
        """Make a process group of this process alone, for comparisons and checkpoints that need all ranks."""
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def join(self) -> None:
        """Meet the others, unless this replica has done so, before the first sample is drawn."""
        for session in self._binding.sessions:
            if session.replica is not None and not session.replica.has_joined:
                session.resume()

    @property
    def leads(self) -> bool:
        """Whether this replica is the first one, which writes checkpoints."""
        return all(session.pace.writes_checkpoints for session in self._binding.sessions)

    def adapt_trainer(self, trainer: Any) -> None:
        """Adapt a new Hugging Face Trainer."""
        transformers.adapt(trainer)


def _log_steps(steps: int) -> None:
    if steps == 0:
        return
    _log.warning(
        "lowbit_strategy: this replica continues where the others are, after optimizer step %d: let your loop follow"
        " accelerator.lowbit.sync.step_index, and advance schedules to it in accelerator.lowbit.replica.on_healed",
        steps,
    )
