"""Local steps of a replica among others that come and go."""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.collectives.transports.member_comm import ExchangeFailedError, MemberComm
from lowbit_strategy.kernels.digest import digests
from lowbit_strategy.methods.outer.interval import Seconds
from lowbit_strategy.ranks.membership import Members, Membership
from lowbit_strategy.rounds.agreement import (
    NO_HISTORY,
    Agreement,
    Standing,
    agree,
    history_after,
    of_replica,
    weights_of,
)
from lowbit_strategy.rounds.elastic_sampler import ElasticSampler
from lowbit_strategy.rounds.in_flight import InFlight, Prepared
from lowbit_strategy.rounds.members_change import MembersChange
from lowbit_strategy.rounds.outer import OuterSync
from lowbit_strategy.rounds.plain_state import receive, send

_KEPT_CHANGES = 1000

_log = logging.getLogger("lowbit_strategy")


class ElasticOuterSync(OuterSync):
    """`OuterSync` whose members are found anew in every turn.

    A turn, on all members:

    1. they meet (`Membership.meet`), and agree on who is right, who is new, and what each counts (`agree`)
    2. those who are new get the state of one who is not; residuals stay with each if members have changed
    3. the exchange, into buffers. If it fails nothing has happened, and it is repeated from 1 with those who are left
    4. they confirm that all have everything: then it is applied. Whoever does not learn of that, because somebody is
       lost at this moment, learns it in 1 of the next turn

    A replica of several ranks does all of this as one (`Membership.together`): each rank exchanges its own shards, and
    what has failed on one of them has failed.

    Attributes:
        membership: Finds the others.
        members: Names of those who took part in the last turn, this replica among them.
        on_change: Called with a sentence that says who has come and who is lost.
        on_join: Called when this replica is about to meet the others for the first time.
        on_healed: Called when this replica has got the others' state: `sync.step_index` is theirs.
        data: Gives this replica its samples, wherever members have met; None: they do not depend on that.
        changes: Those of the members that no record has yet, the last ones.
        num_heals: How often this one has got the state of another.
    """

    revocable: ClassVar[bool] = True

    def __init__(self, *values: Any, membership: Membership, **options: Any) -> None:
        super().__init__(*values, **options)
        self.membership = membership
        self.data: ElasticSampler | None = None
        self.on_change: Callable[[str], None] = _log.info
        self.on_join: Callable[[], object] = lambda: None
        self.on_healed: Callable[[], object] = lambda: None
        self.changes: deque[MembersChange] = deque(maxlen=_KEPT_CHANGES)
        self.num_heals = 0
        self._turn_began = time.monotonic()
        self._goes_on = True  # where rounds are of so many seconds
        self._clock = 0
        self._history = NO_HISTORY
        self._group = 0
        self._trained = self._counted = 0
        self._marks = [0] * len(self.fragments)  # of what has been trained, at the last turn of each
        self._prepared: Prepared | None = None
        self._comm: MemberComm | None = None
        self.members: tuple[str, ...] = ()

    @property
    def turn_length(self) -> int:
        """As `OuterSync`; where rounds are of so many seconds, whether they are over: the steps taken, or one more."""
        return max(1, self._since + self._goes_on) if isinstance(self.rule.every, Seconds) else super().turn_length

    def after_step(self, learning_rate: float | None = None) -> bool:
        self._trained += self._counted or 1
        self._counted = 0
        if isinstance(self.rule.every, Seconds):
            left = self.rule.every.seconds / len(self.fragments) - (time.monotonic() - self._turn_began)
            self._goes_on = self.membership.decide(left > 0)
        before, since = self.num_turns, self._since + 1
        moved = super().after_step(learning_rate)
        if self.num_turns > before:
            self._turn_began = time.monotonic()
            self._every = since * len(self.fragments) if isinstance(self.rule.every, Seconds) else self._every
        return moved

    def count_samples(self, number: int) -> None:
        """So many are trained until the next optimizer step, one if nobody counts; the mean is weighted by them."""
        self._counted += number

    @property
    def has_joined(self) -> bool:
        """Whether it has met the others."""
        return self._comm is not None

    def check_joined(self) -> None:
        """Raises:
        RuntimeError: Training has begun, and it has not met them: weights would change under a backward pass.
        """
        if not self.has_joined:
            raise RuntimeError(
                "this replica trains and has not met the others: call the model itself and not one of its modules, or"
                " call session.resume() before training"
            )

    @property
    def leads(self) -> bool:
        """Whether this replica is the lowest one, which writes checkpoints."""
        return self._comm is None or self._comm.rank == 0

    def join(self) -> None:
        """Before training: meet the others, who may be in the middle of it. Takes up to a round."""
        self.on_join()
        while self._meet(due=False):
            if self._attempt(None, done=False) is not None:
                self.apply()
                break
        self._turn_began = time.monotonic()

    def _launch(self, learning_rate: float | None, *, done: bool) -> InFlight:
        while True:
            self._meet(due=True)
            in_flight = self._attempt(learning_rate, done=done)
            if in_flight is not None:
                return in_flight

    def finish(self) -> None:
        already = self.finished
        super().finish()
        if not already and self._comm is not None:
            with contextlib.suppress(ExchangeFailedError):  # so that nobody is gone before all know that they may go
                self._confirm(self._comm)

    # -- a turn -----------------------------------------------------------------------------------------------------

    def _attempt(self, learning_rate: float | None, *, done: bool) -> InFlight | None:
        """Exchange; None if that has failed."""
        assert self._comm is not None
        before = (self._turn, self._since, self._every)
        try:
            in_flight = self.membership.together(lambda: self._exchanged(learning_rate, done=done))
        except ExchangeFailedError as error:
            self._undo(before)
            self.membership.fail(error)
            return None
        self._prepared = Prepared(in_flight, history_after(self._history, self._clock), before, done)
        try:
            self._confirm(self._comm)
        except ExchangeFailedError as error:
            self.membership.fail(error)
            if not self._prepared.ends:  # there is no next turn to learn it in
                return None
        self.membership.succeed()
        return self._commit()

    def _exchanged(self, learning_rate: float | None, *, done: bool) -> InFlight:
        in_flight = super()._launch(learning_rate, done=done)
        in_flight.wait()
        return in_flight

    def _confirm(self, comm: MemberComm) -> None:
        """Every member has received everything.

        Raises:
            ExchangeFailedError: It is not known.
        """
        everyone = torch.empty(comm.world_size, 1, dtype=torch.uint8)
        comm = copy.copy(comm)  # counts bytes of its own
        self.membership.together(lambda: comm.all_gather(everyone, torch.ones(1, dtype=torch.uint8)).wait())

    def _commit(self) -> InFlight:
        prepared, self._prepared = self._prepared, None
        assert prepared is not None
        self._history = prepared.history
        self._marks[prepared.in_flight.fragment] = self._trained
        return prepared.in_flight

    def _undo(self, before: tuple[int, int, int]) -> None:
        self._turn, self._since, self._every = before
        self._in_flight = self._prepared = None
        self.sync.roll_back()

    # -- meeting ----------------------------------------------------------------------------------------------------

    def _meet(self, *, due: bool) -> bool:
        """All members are connected and have the same state. Returns whether a turn is to be taken."""
        start = time.perf_counter()
        while True:
            with ThreadPoolExecutor(1) as beside:
                digest = beside.submit(self._digest)
                members = self.membership.meet(self._clock)
            try:
                agreement, standings = self._agree(members, digest.result(), due=due)
                self._settle(members, agreement)
            except ExchangeFailedError as error:
                self.membership.fail(error)
                continue
            if not agreement.to_heal and not agreement.to_commit:
                break
        self._place(members, afresh=any(each.group != members.digest for each in standings))
        self._count_from(agreement.steps)
        self.weights = weights_of([each.trained for each in standings])
        if self.data is not None:
            self.data.go_on(agreement.position, members.comm.rank, members.comm.world_size)
        self._log_changes(members, time.perf_counter() - start)
        return agreement.exchanges

    def _agree(self, members: Members, digest: int, *, due: bool) -> tuple[Agreement, list[Standing]]:
        mine = of_replica(_gathered(self.membership.replica, self._standing(digest, due=due)))
        standings = self.membership.together(lambda: _gathered(copy.copy(members.comm), mine))
        return agree(standings), standings

    def _standing(self, digest: int, *, due: bool) -> Standing:
        return Standing(
            clock=self._clock,
            history=self._history,
            prepared=NO_HISTORY if self._prepared is None else self._prepared.history,
            digest=digest,
            steps=self.sync.step_index,
            trained=self._trained - self._marks[self._turn],
            due=int(due),
            group=self._group,
            position=self._position,
        )

    @property
    def _position(self) -> int:
        return 0 if self.data is None else self.data.position

    def _digest(self) -> int:
        """Of all that members share."""
        kept = self._optimizer.state_dict().values()
        tensors = [value for state in kept for value in state.values() if isinstance(value, Tensor)]
        shared = [*self.anchors.values(), *tensors, *self.model.buffers.shared.values()]
        return int(digests([digests(shared, torch.device("cpu"))], torch.device("cpu")))

    def _settle(self, members: Members, agreement: Agreement) -> None:
        """Raises:
        ExchangeFailedError: Somebody is lost while a state travels.
        """
        comm = copy.copy(members.comm)
        if comm.rank in agreement.to_commit:
            prepared = self._prepared
            assert prepared is not None
            self._in_flight = self._commit()
            self.apply(final=prepared.done, average=prepared.ends)
        elif self._prepared is not None:
            self._undo(self._prepared.before)
        if agreement.to_heal:
            state = self.membership.together(lambda: self._hand_over(members, comm, agreement))
            if state is not None:
                self._take_state(state, agreement)
        if comm.rank in agreement.diverged:
            _log.warning(
                "replica %s had other anchors than %s after the same turns, and goes on with those: look for code that"
                " changes weights on some replicas only",
                members.names[comm.rank],
                members.names[agreement.helper],
            )
        self._clock = agreement.clock

    def _place(self, members: Members, *, afresh: bool) -> None:
        """The engine reduces with these members from now on."""
        if self._comm is not members.comm or afresh:
            self._comm = members.comm
            comm = copy.copy(members.comm)
            comm.sent_nbytes = self.sync.ranks.peers.sent_nbytes
            self.sync.renew(replace(self.sync.ranks, peers=comm), afresh=afresh)
            self._group = members.digest

    def _count_from(self, steps: int) -> None:
        self.sync.restore_progress(step_index=steps, num_skipped=self.sync.num_skipped, loss_scale=None)

    def _log_changes(self, members: Members, seconds: float) -> None:
        now, before = tuple(members.names), self.members
        if now == before:
            return
        self.members = now
        change = MembersChange(
            step=self.sync.step_index,
            members=now,
            joined=tuple(name for name in now if name not in before),
            lost=tuple(name for name in before if name not in now),
            seconds=seconds,
        )
        self.changes.append(change)
        if self.membership.replica.rank == 0:
            self.on_change(str(change))

    # -- saving -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        known = {"name": self.membership.identity.name, "clock": self._clock, "history": self._history}
        trained = {"trained": self._trained, "marks": self._marks, "position": self._position}
        return super().state_dict() | {"elastic": known | trained}

    def owns(self, state: Mapping[str, Any]) -> bool:
        return state.get("elastic", {}).get("name") == self.membership.identity.name

    def load_state_dict(self, state: Mapping[str, Any], *, own: bool = True) -> None:
        super().load_state_dict(state, own=own)
        if not own:
            self.sync.forget()  # residuals of another replica, or of other rounds
        if (saved := state.get("elastic")) is None:
            return
        self._clock, self._history = saved["clock"], saved["history"]
        if self.data is not None:
            self.data.go_on(saved["position"], 0, 1)
        if own:
            self._trained, self._marks = saved["trained"], list(saved["marks"])

    # -- state that travels -----------------------------------------------------------------------------------------

    def _hand_over(self, members: Members, comm: MemberComm, agreement: Agreement) -> dict[str, Any] | None:
        """From the helper to those who are new; what this one has received."""
        if comm.rank == agreement.helper:
            for rank in agreement.to_heal:
                _log.info("replica %s gets the state of %s", members.names[rank], members.names[comm.rank])
                self._send_state(comm, rank)
        return self._receive_state(comm, agreement.helper) if comm.rank in agreement.to_heal else None

    def _send_state(self, comm: MemberComm, rank: int) -> None:
        send(self._shared_state(), comm, rank)

    def _receive_state(self, comm: MemberComm, rank: int) -> dict[str, Any]:
        return dict(receive(comm, rank))

    def _shared_state(self) -> dict[str, Any]:
        state = super().state_dict()
        own = ("weights", "flight", "buffers", "since", "losses", "eager")
        shared = {key: value for key, value in state.items() if key not in own}
        shared["losses"] = state["losses"] | {"own": []}
        return shared | {"buffers": {"shared": state["buffers"]["shared"]}, "step_index": self.sync.step_index}

    def _take_state(self, state: Mapping[str, Any], agreement: Agreement) -> None:
        """Go on from what the others share; what this replica has trained since its last turn is lost."""
        super().load_state_dict({**state, "flight": None}, own=False)
        self._go_on(state)
        self._history = agreement.history
        self._marks = [self._trained] * len(self.fragments)
        self._group = 0
        self.sync.forget()
        self._count_from(state["step_index"])
        self.num_heals += 1
        self.on_healed()


def _gathered(comm: Comm, mine: Standing) -> list[Standing]:
    """Of all ranks of `comm`."""
    numbers = torch.tensor(astuple(mine), dtype=torch.int64)
    everyone = torch.empty(comm.world_size, numbers.numel(), dtype=torch.int64)
    comm.all_gather(everyone, numbers).wait()
    return [Standing(*row) for row in everyone.tolist()]
