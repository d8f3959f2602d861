"""Local steps of a replica among others that come and go. torchft's `DiLoCo` uses all-reduces without error feedback.

torchft's also discards a replica's local steps when an exchange fails, and hands over state as pickles.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from lowbit_strategy.elastic.agreement import (
    NO_HISTORY,
    Agreement,
    MemberState,
    agree,
    gathered_states,
    merge_ranks,
)
from lowbit_strategy.elastic.member_comm import ExchangeFailedError, MemberComm
from lowbit_strategy.elastic.members_change import MembersChange
from lowbit_strategy.elastic.membership import Members, Membership
from lowbit_strategy.elastic.plain_state import receive, send
from lowbit_strategy.elastic.sampler import ElasticSampler
from lowbit_strategy.elastic.standing import Standing
from lowbit_strategy.elastic.timed_turns import TimedTurns
from lowbit_strategy.inform import inform
from lowbit_strategy.kernels.digest import digests
from lowbit_strategy.local_steps.fragment_sync import FragmentSync
from lowbit_strategy.local_steps.outer_sync import OuterSync
from lowbit_strategy.telemetry.startup_report import startup_report

if TYPE_CHECKING:
    from lowbit_strategy.attach.session import Session

_log = logging.getLogger("lowbit_strategy")


class PendingCommit(NamedTuple):
    """A fragment that this replica has received completely, without knowing whether all replicas have.

    Args:
        in_flight: The fragment.
        history: What the history becomes if it is committed.
        before: `Turns.moment` to roll back to.
        done: Whether this replica has stopped training.
    """

    in_flight: FragmentSync
    history: int
    before: tuple[int, int, int]
    done: bool

    @property
    def ends(self) -> bool:
        """Whether all members have stopped training, so that there is no next meeting."""
        return self.done and self.in_flight.header.all_done


class ElasticOuterSync(OuterSync):
    """An `OuterSync` whose members are found again for every fragment.

    A fragment's synchronization, on all members:

    1. they meet (`Membership.rendezvous`), and agree on whose state is right, who is new, and each one's weight
       (`agree`)
    2. new members get the state of an existing one; all keep their residuals unless members have changed
    3. they exchange into buffers. If that fails, nothing has happened, and it is repeated from 1 with the remaining
       members
    4. they confirm that all have everything, and apply it. A member that does not learn this, because a different one
       is lost at this moment, learns it at the next meeting

    The ranks of a replica do all of this together (`Membership.together`): each rank exchanges its own shards, and a
    failure on one counts as a failure on all.

    Attributes:
        membership: Finds the other replicas.
        standing: What this replica has committed and trained.
        members: Names of the last participants, including this replica.
        on_healed: Called when this replica has received the others' state: `sync.step_index` is theirs.
        data: Gives this replica its samples, which depend on the members; None: they do not.
        num_heals: How often this replica has received the state of a different one.
    """

    revocable: ClassVar[bool] = True
    turns_of = TimedTurns
    turns: TimedTurns

    def __init__(self, *values: Any, membership: Membership, **options: Any) -> None:
        super().__init__(*values, **options)
        self.membership = membership
        self.data: ElasticSampler | None = None
        self._stop_waiting: Callable[[], object] = lambda: None  # for the first training forward pass
        self.on_healed: Callable[[], object] = lambda: None
        self.num_heals = 0
        self.standing = Standing(len(self.fragments))
        self._pending: PendingCommit | None = None
        self._comm: MemberComm | None = None
        self.members: tuple[str, ...] = ()
        self.replica = self

    def after_step(self, learning_rate: float | None = None) -> None:
        self.standing.step()
        if (left := self.turns.seconds_left) is not None:
            self.turns.has_time = self.membership.decide(left > 0)
        before, since = self.num_syncs, self.turns.since + 1
        super().after_step(learning_rate)
        if self.num_syncs > before:
            self.turns.restart_clock(since)

    def count_samples(self, number: int) -> None:
        """Count samples before the next optimizer step, which weight the mean; if never called, one per step."""
        self.standing.count_samples(number)

    def attached(self, session: Session, module: nn.Module) -> None:
        """Meet the others before the first training forward pass; weights must not change between it and backward."""

        @torch.compiler.disable
        def join(module: nn.Module, args: Any) -> None:
            if module.training and torch.is_grad_enabled():
                session.resume()

        hook = module.register_forward_pre_hook(join, prepend=True)  # before the one in which FSDP2 gathers weights
        self._stop_waiting = hook.remove

    def check_extendable(self) -> None:
        raise RuntimeError(
            "parameters have been unfrozen, but replicas that come and go must train the same ones all the time:"
            " unfreeze them before training begins, and start a separate run"
        )

    def leave(self) -> None:
        self._stop_waiting()
        self.membership.leave()

    @property
    def has_joined(self) -> bool:
        """Whether this replica has met the others."""
        return self._comm is not None

    def begin_backward(self, loss: Tensor | float | None = None) -> None:
        """Raise a RuntimeError if this replica has not met the others: weights would change during a backward pass."""
        if not self.has_joined:
            raise RuntimeError(
                "this replica trains but has not met the others: call the model itself and not one of its modules, or"
                " call session.resume() before training"
            )
        super().begin_backward(loss)

    @property
    def leads(self) -> bool:
        """Whether this replica is the first one, which writes checkpoints."""
        return self._comm is None or self._comm.rank == 0

    def join(self) -> None:
        """Meet the others before training; they may be in the middle of it. This takes up to a round."""
        self._stop_waiting()
        while (agreement := self._rendezvous(due=False)).exchanges:
            if self._attempt(agreement, done=False) is not None:
                self.apply()
                break
        self.turns.restart_clock()
        if self.sync.ranks.everyone.rank == 0 and (report := startup_report(self.sync)):
            inform("%s", report)  # their number is only known now

    def _launch(self, *, done: bool) -> FragmentSync:
        while True:
            in_flight = self._attempt(self._rendezvous(due=True), done=done)
            if in_flight is not None:
                return in_flight

    def finish(self) -> None:
        already = self.finished
        super().finish()
        if not already and self._comm is not None:
            with contextlib.suppress(ExchangeFailedError):  # no replica leaves before all know that they may
                self._confirm(self._comm)

    # -- exchange and commit ----------------------------------------------------------------------------------------

    def _attempt(self, agreement: Agreement, *, done: bool) -> FragmentSync | None:
        """Exchange as agreed; return None if that failed."""
        assert self._comm is not None
        before = self.turns.moment
        try:
            in_flight = self.membership.together(lambda: self._exchanged(done=done))
        except ExchangeFailedError as error:
            self._roll_back(before)
            self.membership.fail(error)
            return None
        self._pending = PendingCommit(in_flight, agreement.history_after, before, done)
        try:
            self._confirm(self._comm)
        except ExchangeFailedError as error:
            self.membership.fail(error)
            if not self._pending.ends:  # otherwise members learn it when they meet again
                return None
        self.membership.succeed()
        return self._commit()

    def _exchanged(self, *, done: bool) -> FragmentSync:
        in_flight = super()._launch(done=done)
        in_flight.wait()
        return in_flight

    def _confirm(self, comm: MemberComm) -> None:
        """Return once every member has received everything.

        Raises:
            ExchangeFailedError: A member is lost, and it is unknown whether it has received everything.
        """
        everyone = torch.empty(comm.world_size, 1, dtype=torch.uint8)
        comm = copy.copy(comm)  # a separate byte counter
        self.membership.together(lambda: comm.all_gather(everyone, torch.ones(1, dtype=torch.uint8)).wait())

    def _commit(self) -> FragmentSync:
        pending, self._pending = self._pending, None
        assert pending is not None
        self.standing.commit(pending.history, pending.in_flight.place)
        return pending.in_flight

    def _roll_back(self, before: tuple[int, int, int]) -> None:
        self.turns.go_back(before)
        self._in_flight = self._pending = None
        self.sync.roll_back()

    # -- meeting ----------------------------------------------------------------------------------------------------

    def _rendezvous(self, *, due: bool) -> Agreement:
        """Wait until all members are connected and have the same state. Return what they have agreed on."""
        start = time.perf_counter()
        while True:
            with ThreadPoolExecutor(1) as beside:
                digest = beside.submit(self._digest)
                members = self.membership.rendezvous(self.standing.clock)
            try:
                mine = merge_ranks(gathered_states(self.membership.replica, self._state(digest.result(), due=due)))
                states = self.membership.together(functools.partial(gathered_states, copy.copy(members.comm), mine))
                agreement = agree(states)
                self._settle(members, agreement)
                if agreement.to_heal or agreement.to_commit:
                    continue
                self._compare_buffers(members, states, agreement.helper)
            except ExchangeFailedError as error:
                self.membership.fail(error)
                continue
            break
        self._use(members, fresh_residuals=any(each.group != members.digest for each in states))
        self._set_step(agreement.steps)
        self.weights = agreement.weights
        if self.data is not None:
            self.data.go_on(agreement.position, members.comm.rank, members.comm.world_size)
        self._log_changes(members, time.perf_counter() - start)
        return agreement

    def _state(self, digest: int, *, due: bool) -> MemberState:
        return self.standing.report(
            self.turns.place,
            prepared=NO_HISTORY if self._pending is None else self._pending.history,
            digest=digest,
            steps=self.sync.step_index,
            due=due,
            position=self._position,
        )

    @property
    def _position(self) -> int:
        return 0 if self.data is None else self.data.position

    def _digest(self) -> int:
        """Digest of everything that members share."""
        kept = self._optimizer.state_dict().values()
        tensors = [value for state in kept for value in state.values() if isinstance(value, Tensor)]
        shared = [*self.anchors.values(), *tensors, *self.model.buffers.shared.values()]
        return int(digests([digests(shared, torch.device("cpu"))], torch.device("cpu")))

    def _settle(self, members: Members, agreement: Agreement) -> None:
        """Commit, roll back or heal, as agreed.

        Raises:
            ExchangeFailedError: A member is lost while a state travels.
        """
        rank, pending = members.comm.rank, self._pending
        if rank in agreement.to_commit:
            assert pending is not None
            self._in_flight = self._commit()
            self.apply(final=pending.done, average=pending.ends)
        elif pending is not None:
            self._roll_back(pending.before)
        if agreement.to_heal:
            state = self.membership.together(lambda: self._hand_over(members, agreement))
            if state is not None:
                self._heal(state, agreement)
        if rank in agreement.diverged:
            _log.warning(
                "replica %s had different anchors from %s after the same turns, and continues with those of the latter:"
                " look for code that changes weights on some replicas only",
                members.names[rank],
                members.names[agreement.helper],
            )
        self.standing.clock = agreement.clock

    def _compare_buffers(self, members: Members, states: Sequence[MemberState], helper: int) -> None:
        """Compare buffers once per round, and give a new member the values that the others agree on.

        Raises:
            ExchangeFailedError: A member is lost; nothing has changed.
        """
        known = [rank for rank, state in enumerate(states) if not state.is_new] or [helper]
        if len(known) == len(states) and not self.turns.is_last:
            return
        comm, device = copy.copy(members.comm), self.sync.device
        differing = functools.partial(self.model.buffers.differing, comm, device, known, floats_only=True)
        self.model.buffers.take_differing(self.membership.together(differing))
        self.standing.is_new = False

    def _use(self, members: Members, *, fresh_residuals: bool) -> None:
        """Let the engine reduce with these members from now on."""
        if self._comm is not members.comm or fresh_residuals:
            self._comm = members.comm
            comm = copy.copy(members.comm)
            comm.sent_nbytes = self.sync.ranks.peers.sent_nbytes
            self.sync.renew(replace(self.sync.ranks, peers=comm), afresh=fresh_residuals)
            self.standing.group = members.digest

    def _set_step(self, steps: int) -> None:
        self.sync.restore_progress(step_index=steps, num_skipped=self.sync.num_skipped, loss_scale=None)

    def _log_changes(self, members: Members, seconds: float) -> None:
        now, before = tuple(members.names), self.members
        if now == before:
            return
        self.members = now
        change = MembersChange.between(before, now, step=self.sync.step_index, seconds=seconds)
        self.sync.notes.append(("members", asdict(change)))
        if self.membership.replica.rank == 0:
            inform("lowbit_strategy: %s", str(change))

    # -- state: in checkpoints, and for members that heal ------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        own = {"name": self.membership.identity.name, "position": self._position}
        return super().state_dict() | {"elastic": own | self.standing.state_dict()}

    def owns(self, state: Mapping[str, Any]) -> bool:
        return state.get("elastic", {}).get("name") == self.membership.identity.name

    def load_state_dict(self, state: Mapping[str, Any], *, own: bool = True) -> None:
        super().load_state_dict(state, own=own)
        if not own:
            self.sync.forget()  # residuals of a different replica, or of different rounds
        if (saved := state.get("elastic")) is None:
            return
        self.standing.load_state_dict(saved, own=own)
        if self.data is not None:
            self.data.go_on(saved["position"], 0, 1)

    def _hand_over(self, members: Members, agreement: Agreement) -> dict[str, Any] | None:
        """Send state from the helper to the members that heal. Return the state that this member has received."""
        comm = copy.copy(members.comm)
        if comm.rank == agreement.helper:
            for rank in agreement.to_heal:
                _log.info("replica %s gets the state of %s", members.names[rank], members.names[comm.rank])
                self._send_state(comm, rank)
        return receive(comm, agreement.helper) if comm.rank in agreement.to_heal else None

    def _send_state(self, comm: MemberComm, rank: int) -> None:
        """Send the state that all replicas share."""
        state = super().state_dict()
        shared = {key: value for key, value in state.items() if key not in ("weights", "flight", "since", "eager")}
        shared |= {"losses": state["losses"] | {"own": []}, "buffers": {"shared": state["buffers"]["shared"]}}
        send(shared | {"step_index": self.sync.step_index}, comm, rank)

    def _heal(self, state: Mapping[str, Any], agreement: Agreement) -> None:
        """Continue from what the others share. Local steps since the last synchronization are lost."""
        super().load_state_dict({**state, "flight": None}, own=False)
        self._continue_round(state)
        self.standing.heal(agreement.history)
        self.sync.forget()
        self._set_step(state["step_index"])
        self.num_heals += 1
        self.on_healed()
