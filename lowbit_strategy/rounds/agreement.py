"""What replicas agree on when they meet: torchft's `Manager` votes inside one replica, and compares step numbers alone.

With it one replica commits while another does not, and two with other weights after the same number of steps continue
as two runs. Here a synchronization is committed in two steps: all have received everything (they are prepared), and all
know it. If a member is lost in between, some know and some do not. So each member has a history, a number that names
all synchronizations committed so far, and a prepared one knows what it would become. When members meet again, those who
have committed tell the others by their history. Pure functions of numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace

import torch
from torch.utils.data import Dataset, DistributedSampler

from lowbit_strategy.kernels.reference.rng import hash32

NO_HISTORY = 0


@dataclass(frozen=True, slots=True)
class MemberState:
    """What one member reports when members meet; integers only.

    Args:
        clock: Agreements so far, of all members that it has met; 0: it is new.
        history: Of the synchronizations that it has committed.
        prepared: What `history` becomes if the one that it is prepared for was committed; `NO_HISTORY`: it is not.
        digest: Of all that members share: anchors, outer optimizer, averaged buffers.
        steps: Optimizer steps.
        trained: Samples since the next fragment was last synchronized.
        due: It is ready to synchronize; otherwise it only joins.
        group: Digest of the members to which its residuals belong.
        position: How far the stream of samples has been used.
        is_new: Its buffers and frozen parameters have not been compared since it started or healed.
    """

    clock: int
    history: int
    prepared: int
    digest: int
    steps: int
    trained: int
    due: int
    group: int
    position: int
    is_new: int = 0


@dataclass(frozen=True, slots=True)
class Agreement:
    """The same on all members.

    Args:
        helper: The member whose state is everyone's.
        clock: Agreements so far, with this one.
        history: The helper's.
        to_commit: Members that are prepared for the helper's history: they commit what they have.
        to_heal: Members that have another state: they get the helper's.
        diverged: Of those, the ones with the helper's history, but other weights.
        steps: Optimizer steps that count for all.
        position: Where the stream of samples continues.
        exchanges: Whether they synchronize now.
    """

    helper: int
    clock: int
    history: int
    to_commit: tuple[int, ...]
    to_heal: tuple[int, ...]
    diverged: tuple[int, ...]
    steps: int
    position: int
    exchanges: bool


def merge_ranks(states: Sequence[MemberState]) -> MemberState:
    """What a replica reports, from its ranks in order, which differ in their shards and samples."""
    digests = ",".join(str(each.digest) for each in states)
    return replace(
        states[0],
        digest=int.from_bytes(hashlib.sha256(digests.encode()).digest()[:7], "big"),
        trained=sum(each.trained for each in states),
        position=max(each.position for each in states),
    )


def agree(states: Sequence[MemberState]) -> Agreement:
    """From all members, in the order of ranks."""
    ranks = range(len(states))
    # the last to have met others is right: those who continued without someone agreed to. Among those, one who knows
    helper = max(ranks, key=lambda rank: (states[rank].clock, states[rank].prepared == NO_HISTORY, -rank))
    right = states[helper]
    same = [rank for rank in ranks if states[rank].history == right.history]
    knows = right.history != NO_HISTORY
    to_commit = tuple(r for r in ranks if knows and r not in same and states[r].prepared == right.history)
    diverged = tuple(rank for rank in same if states[rank].digest != right.digest and states[rank].clock)
    healed = {*ranks} - {*same} - {*to_commit} | {rank for rank in same if states[rank].digest != right.digest}
    unchanged = [each for rank, each in enumerate(states) if rank not in healed]
    return Agreement(
        helper=helper,
        clock=1 + max(each.clock for each in states),
        history=right.history,
        to_commit=to_commit,
        to_heal=tuple(sorted(healed)),
        diverged=diverged,
        steps=max(each.steps for each in unchanged),
        position=max(each.position for each in unchanged),
        exchanges=any(each.due for each in states),
    )


def history_after(history: int, clock: int) -> int:
    """What a history becomes when the synchronization of agreement number `clock` is committed; never `NO_HISTORY`."""
    return hash32(hash32(history) + clock) or 1


def sample_weights(trained: Sequence[int]) -> tuple[float, ...]:
    """Each member's weight, 1 on average; exactly 1 if all have trained equally many samples, or none."""
    total = sum(trained)
    return tuple(each * len(trained) / total if total else 1.0 for each in trained)


@dataclass(frozen=True, kw_only=True, slots=True)
class MembersChange:
    """The members are others than at the synchronization before.

    Args:
        step: Optimizer steps completed before.
        members: The names of all, in the order of ranks.
        joined: Those that are new; at first all.
        lost: Those that are gone.
        seconds: From the end of a round, or the start, until all that are left had met and had the same state.
    """

    step: int
    members: tuple[str, ...]
    joined: tuple[str, ...]
    lost: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        changes = [
            f"{what}: {', '.join(names)}" for what, names in (("joined", self.joined), ("lost", self.lost)) if names
        ]
        return (
            f"optimizer step {self.step}: {len(self.members)} replicas ({', '.join(self.members)});"
            f" {'; '.join(changes) or 'in another order'}; met in {self.seconds:.1f} s"
        )


class ElasticSampler(DistributedSampler[int]):
    """Gives the replicas of an elastic run different samples of one stream: permutation after permutation of a dataset.

    When replicas meet they agree on how far the stream has been used. From there rank r of all W takes every W-th
    sample, starting with number r, until they meet again; then the stream continues after the farthest one. Nothing is
    repeated. Samples that a slower replica skipped, or a lost one had, are not made up for.

    It is a `DistributedSampler`, which frameworks do not replace. Each replica's epoch has the length of the dataset,
    for any number of replicas, so a framework's plans by epochs hold. The stream continues across epochs. Ranks that
    share one model share its samples and its epoch.

    Args:
        dataset: Of a known length, the same on all replicas.
        shuffle: Permute it, otherwise as it is.
        seed: Of the permutations; the same on all replicas.
        rank: In its replica.
        num_ranks: Of the replica; 1 on all of them if the framework divides its samples among them, as Accelerate does.

    Attributes:
        on_begin: Called before the first sample of an epoch is drawn.
    """

    def __init__(
        self, dataset: Dataset[int], *, shuffle: bool = True, seed: int = 0, rank: int = 0, num_ranks: int = 1
    ) -> None:
        super().__init__(dataset, num_replicas=num_ranks, rank=rank, shuffle=shuffle, seed=seed)
        assert isinstance(dataset, Sized)
        self._size = len(dataset)
        self.on_begin: Callable[[], object] = lambda: None
        self._rank, self._world_size = rank, num_ranks
        self._start = 0  # of the stream, when members last met
        self._drawn = 0  # by this replica, since
        self._permutation: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        return -(-self._size // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        self.on_begin()
        for _ in range(len(self)):
            at = self._start + self._drawn * self._world_size + self._rank
            self._drawn += 1
            yield self._sample(at)

    @property
    def position(self) -> int:
        """How far the stream has been used, to this replica's knowledge."""
        return self._start + self._drawn * self._world_size

    def go_on(self, start: int, place: int, num_members: int) -> None:
        """Members have met.

        Args:
            start: How far the stream has been used.
            place: This replica's, among all.
            num_members: How many replicas there are.
        """
        self._start, self._drawn = start, 0
        self._rank, self._world_size = place * self.num_replicas + self.rank, num_members * self.num_replicas

    def _sample(self, at: int) -> int:
        number, place = divmod(at, self._size)
        if self._permutation[0] != number:
            generator = torch.Generator().manual_seed(self.seed + number)
            order = torch.randperm(self._size, generator=generator) if self.shuffle else torch.arange(self._size)
            self._permutation = (number, order.tolist())
        return self._permutation[1][place]
