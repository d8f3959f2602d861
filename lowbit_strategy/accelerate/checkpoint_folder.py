"""Residuals inside a checkpoint's folder, so that what copies, rotates or removes the folder takes them along.

``<folder>/residuals.lowbit/`` has one file per rank and ``stamp.json``, which lists those that belong to the
checkpoint; a second prepared model has ``residuals_1.lowbit``, and so on.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from lowbit_strategy.attach.session import Session
from lowbit_strategy.checkpoint import residual_files
from lowbit_strategy.checkpoint.all_ranks import Stamp, first_problem, gather
from lowbit_strategy.checkpoint.residual_files import ResidualFileError
from lowbit_strategy.rounds.agreement import ElasticSampler


def save(folder: str, sessions: Sequence[Session], *, writes_stamp: bool) -> None:
    """Write this rank's files into `folder`; call on all ranks.

    Args:
        folder: Of the checkpoint.
        sessions: One per prepared model.
        writes_stamp: On one rank of each machine: machines may not share a file system.

    Raises:
        ResidualFileError: On every rank, if one of them cannot write.
    """
    for index, session in enumerate(sessions):
        path = _path(folder, index)
        with session.save(path) as stamp:
            problem = _write(_stamp_file(path), stamp) if writes_stamp else None
            if (message := first_problem(gather(problem, session.group))) is not None:
                raise ResidualFileError(message)


def load(folder: str, sessions: Sequence[Session], *, compressed: bool = False) -> None:
    """Restore what `save` wrote.

    Args:
        folder: Of the checkpoint.
        sessions: As when it was saved.
        compressed: The checkpoint is known to be of a compressed run: without residuals it is incomplete.

    Raises:
        ResidualFileError: Files are missing or damaged, and ``on_missing_residual="error"``.
        ValueError: The residuals are of another model.
    """
    for index, session in enumerate(sessions):
        path = _path(folder, index)
        stamp = _read(_stamp_file(path))
        if stamp is None and compressed:
            stamp = ResidualFileError(
                f"the run that saved {path} was compressed, but its residuals are not there (was it stopped while"
                ' saving?): take an earlier checkpoint, or pass on_missing_residual="reset" to continue with residuals'
                " of zero"
            )
        session.load(path, stamp)


def _path(folder: str, index: int) -> str:
    return os.path.join(folder, "residuals" if index == 0 else f"residuals_{index}")


def _stamp_file(path: str) -> str:
    return os.path.join(residual_files.sidecar_folder(path), "stamp.json")


def _write(target: str, stamp: Stamp) -> str | None:
    """The reason if it cannot be written."""
    partial = f"{target}.{uuid.uuid4().hex}.part"
    try:
        with open(partial, "w", encoding="utf-8") as file:
            json.dump(stamp, file)
        os.replace(partial, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.remove(partial)
        return f"{target} cannot be written ({error}): make room or give another folder"
    return None


def _read(name: str) -> Stamp | ResidualFileError | None:
    """The stamp, None if missing, or the error if unreadable."""
    try:
        with open(name, encoding="utf-8") as file:
            stamp: Any = json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return ResidualFileError(
            f'{name} cannot be read ({error}): restore it, or pass on_missing_residual="reset" to continue with'
            " residuals of zero"
        )
    return {} if stamp is None else stamp


_log = logging.getLogger("lowbit_strategy")


class ReplicaBinding:
    """Called by the binding at an accelerator's moments, where replicas come and go.

    Args:
        sessions: Gives the models in use.
        seed: Of the permutations of samples; the same on all replicas.

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

    @property
    def leads(self) -> bool:
        """Whether this replica is the lowest one, which writes checkpoints."""
        return all(session.replica is None or session.replica.leads for session in self._sessions())

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
        kept = inspect.signature(DataLoader).parameters.keys() - {"sampler", "batch_sampler", "shuffle"}
        return DataLoader(**{name: getattr(loader, name) for name in kept}, sampler=self._sampler)

    def attach(self, session: Session) -> None:
        """A model has been prepared."""
        replica = session.replica
        assert replica is not None
        replica.data = self._sampler
        replica.on_healed = lambda: self.on_healed(replica.sync.step_index)

    def join(self) -> None:
        """Meet the others, if this replica has not yet: before the first sample is drawn."""
        for session in self._sessions():
            if session.replica is not None and not session.replica.has_joined:
                session.resume()

    def count_samples(self) -> None:
        """Before a backward pass: those of one batch."""
        for session in self._sessions():
            if session.replica is not None:
                session.replica.count_samples(self._batch_size)


def make_own_group() -> None:
    """A process group of this process alone, for the comparisons and checkpoints that take all ranks."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _log_steps(steps: int) -> None:
    if steps == 0:
        return
    _log.warning(
        "lowbit_strategy: this replica goes on where the others are, after optimizer step %d: let your loop go by"
        " accelerator.lowbit.sync.step_index, and bring schedules there in accelerator.lowbit.replica.on_healed",
        steps,
    )
