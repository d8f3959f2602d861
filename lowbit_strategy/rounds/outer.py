"""Local steps with an outer optimizer, on one rank: when fragments synchronize, and how anchors and weights move."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowbit_strategy.engine.bucket import Stages
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods.outer.interval import Interval
from lowbit_strategy.methods.outer.rule import OuterRule
from lowbit_strategy.model.handshake import to_plain
from lowbit_strategy.plan.rounds import cut_into
from lowbit_strategy.rounds.anchored_model import AnchoredModel, AveragedBuffers
from lowbit_strategy.rounds.fragment import AnchorOptimizer, EagerUpdate, Fragment
from lowbit_strategy.rounds.fragment_sync import (
    AsyncReducer,
    BlockingReducer,
    FragmentSyncHeader,
    InFlight,
    RoundLosses,
    warn_of,
)
from lowbit_strategy.rounds.inner_state import InnerState, States

STATE_KEY = "outer"  # of each rank's own saved state

_log = logging.getLogger("lowbit_strategy")


class OuterSync:
    """Local steps on one rank: fragments synchronize one after another, and the outer optimizer moves their anchors.

    A fragment's synchronization, on all ranks, each when it comes to it:

    1. a header (`FragmentSyncHeader`) is summed over ranks uncompressed, a kilobyte: a sample of the pseudo-gradient,
       changes of buffers, and whether the rank's weights are finite. A rank where they are not sends zeros
    2. the pseudo-gradient goes through `GradientSync.reduce`
    3. `OuterRule.delay_of` steps later the outer optimizer steps the anchor with the mean over the ranks that were
       finite, and the weights follow. A rank that was not continues from the anchors of all fragments

    The order of fragments is the same on all ranks and nothing else here is collective, so ranks may train at different
    speeds, and one that has no more data takes part until all are done (`finish`).

    Args:
        sync: Reduces pseudo-gradients. Its steps are counted here.
        params: By name, as `sync` knows them, in the order in which they are cut into fragments.
        rule: When, and by which optimizer.
        buffers: Gives the model's buffers and frozen parameters by name; see `AveragedBuffers`.
        reducer: Brings fragments to the other ranks.
        states: Gives what the inner optimizers keep of each parameter, by its name and their key.

    Attributes:
        every: Optimizer steps of each coming round, instead of the rule's; None: as the rule has it.
        num_syncs: Fragment synchronizations completed.
        on_sync: Called after each one, on all ranks, when nothing is in flight; it may be collective.
        asks: Whether this rank wants all ranks to do something together after a synchronization.
        asked: Whether a rank has asked in a completed one; the same on all ranks.
        finished: Whether `finish` has been called since the last step: the model is the user's.
        on_left_out: Called after this rank was left out of a synchronization, with the anchors in the model.
        weights: Each rank's weight, 1 on average; empty: all 1.
    """

    revocable: ClassVar[bool] = False

    def __init__(
        self,
        sync: GradientSync,
        params: Mapping[str, Tensor],
        rule: OuterRule,
        *,
        buffers: Callable[[], Mapping[str, Tensor]] = dict,
        reducer: AsyncReducer | None = None,
        states: Callable[[], States] = dict,
    ) -> None:
        self.sync = sync
        self.rule = rule
        self.every: int | None = None
        self.num_syncs = 0
        self.on_sync: Callable[[], None] = lambda: None
        self.asks: Callable[[], bool] = bool
        self.asked = False
        self.on_left_out: Callable[[], None] = lambda: None
        self.weights: tuple[float, ...] = ()
        self._reducer = reducer if reducer is not None else BlockingReducer()
        self._inner = InnerState(sync, rule.average_state, states) if rule.average_state else None
        parts = cut_into([sync.specs[name] for name in params if name in sync.specs], rule.fragments)
        self.model = AnchoredModel([Fragment(part, params) for part in parts], AveragedBuffers(buffers), sync)
        self._optimizer = AnchorOptimizer(rule, self.anchors)
        self._eager = EagerUpdate(rule, self.fragments, sync.ranks.peers.world_size) if rule.eager else None
        self._in_flight: InFlight | None = None
        self._next = self._since = 0  # fragment to send next; optimizer steps since the last one was sent
        self._every = rule.round_length(sync.step_index, None)
        self._rates: tuple[float | None, float | None] = (None, None)  # learning rates of the last two steps
        self._losses = RoundLosses(sync.device)
        self.finished = False
        self._spread: Tensor | None = None
        sync.train_locally(self, revocable=self.revocable)

    @property
    def anchors(self) -> dict[str, Tensor]:
        """float32, by name: what all ranks share."""
        return self.model.anchors

    @property
    def fragments(self) -> list[Fragment]:
        return self.model.fragments

    @property
    def sync_interval(self) -> int:
        """Optimizer steps from the last fragment that was sent to the next."""
        count = len(self.fragments)
        return -(-(self._next + 1) * self._every // count) - -(-self._next * self._every // count)

    @property
    def round_length(self) -> int:
        """Optimizer steps of the current round."""
        return self._every

    @property
    def drift(self) -> float | None:
        """How far ranks had drifted apart before the last synchronization: the root mean square of their distances from
        the mean, in units of the mean movement; from a sample. None before the first. Reading it waits for the device.
        """
        if self._spread is None:
            return None
        each, mean = self._spread.tolist()
        return (max(0.0, each - mean) / mean) ** 0.5 if mean > 0 else 0.0

    # -- steps ------------------------------------------------------------------------------------------------------

    def observe_loss(self, loss: Tensor | float) -> None:
        """Of a batch of this rank, before it steps; always in the same unit. Does not wait for the device."""
        if isinstance(self.rule.every, Interval):
            self._losses.observe(loss)

    def after_step(self, learning_rate: float | None = None) -> bool:
        """The inner optimizer has stepped, or a loss scaler has skipped the step. Call on all ranks.

        Args:
            learning_rate: Of the inner optimizer.

        Returns:
            Whether an anchor has moved.
        """
        self.sync.count_local_step()
        self._since += 1
        self._rates = (self._rates[1], learning_rate)
        moved = self.finished = False
        if self._in_flight is not None:
            self._in_flight.age += 1
            moved = self._apply_if_due()
        if self._since >= self.sync_interval:
            moved = self.apply() or moved  # still in flight: rounds have become shorter
            self._launch(learning_rate, done=False)
            moved = self._apply_if_due() or moved
        return moved

    def finish(self) -> None:
        """This rank trains no more: steps since the last synchronization are averaged into the anchors.

        Call on all ranks, each when it is done. Until all are, this rank takes part in the others' synchronizations;
        then each fragment has a last one, which takes the mean of the weights without the outer optimizer.
        """
        if self.finished:
            return
        self.apply()
        all_done = False
        while not all_done:
            in_flight = self._launch(None, done=True)
            in_flight.wait()
            all_done = in_flight.header.all_done
            self.apply(final=True, average=all_done)
        for _ in range(len(self.fragments) - 1):
            self._launch(None, done=True)
            self.apply(final=True, average=True)
        self.finished = True

    def _launch(self, learning_rate: float | None, *, done: bool) -> InFlight:
        """Send the next fragment."""
        fragment, sync = self.fragments[self._next], self.sync
        x_N = fragment.pseudo_gradient()
        finite = self._finite(x_N)
        with_buffers = self._next == len(self.fragments) - 1
        changes = self.model.buffers.changes() if with_buffers else []
        own = self.weights[sync.ranks.peers.rank] if self.weights else 1.0
        for mine in (x_N, *changes):
            mine.masked_fill_(finite == 0, 0.0)
            if own != 1.0:
                mine.mul_(own)
        header = FragmentSyncHeader.of(
            sync, x_N[fragment.sample], changes, done=done, asks=self.asks(), loss=self._losses.take(), finite=finite
        )
        if self._eager is not None and not done:
            self._eager.before_sending(fragment, x_N, sync.step_index)
        sync.begin_step(steps_per_reduction=max(1, self._since))  # where controllers decide
        reduced = [(layout, x_N[part]) for layout, part in fragment.buckets]
        arrivals = [self._reducer.submit(self._summed(header.flat), result=header.flat, last=False)]
        sent, self._next, self._since = self._next, (self._next + 1) % len(self.fragments), 0
        if self._next == 0:
            self._every = max(self.every or self._next_round(learning_rate), len(self.fragments))
        arrivals += [
            self._reducer.submit(sync.reduce(layout, x, x), result=x, last=layout.last) for layout, x in reduced
        ]
        delay = self.rule.delay_of(self.sync_interval)
        self._in_flight = InFlight(sent, x_N, header, arrivals, delay, weights=self.weights)
        return self._in_flight

    def _next_round(self, learning_rate: float | None) -> int:
        earlier, last = self._rates
        rising = earlier is not None and last is not None and last > earlier
        step, progress = self.sync.step_index, self._losses.progress
        return self.rule.round_length(step, learning_rate, rising=rising, progress=progress)

    def _finite(self, x_N: Tensor) -> Tensor:
        """1 if all is finite on all ranks that shard one model, otherwise 0."""
        sync = self.sync
        bad = torch.zeros((), device=x_N.device)
        if x_N.numel():
            bad = 1.0 - torch.stack(torch.aminmax(x_N)).isfinite().all().float()
        if sync.ranks.intra_node is not None:
            sync.ranks.intra_node.all_reduce_max(bad).wait()
        return 1.0 - bad

    def _summed(self, header: Tensor) -> Stages:
        comm = self.sync.ranks.peers
        before = comm.sent_nbytes
        pending = comm.all_reduce(header)
        self.sync.byte_check.add_untracked(comm.sent_nbytes - before)
        yield pending

    def _apply_if_due(self) -> bool:
        if self._in_flight is None or self._in_flight.age < self._in_flight.delay:
            return False
        return self.apply()

    def apply(self, *, final: bool = False, average: bool = False) -> bool:
        """Apply the fragment in flight, on all ranks at the same point.

        Args:
            final: The weights become the anchor; no share of the rank's own is kept.
            average: Take the mean of the weights, without the outer optimizer.

        Returns:
            Whether a fragment was in flight.
        """
        if self._in_flight is None:
            return False
        in_flight, self._in_flight = self._in_flight, None
        in_flight.wait()
        fragment, mean_N = self.fragments[in_flight.fragment], in_flight.x
        left_out = in_flight.header.left_out
        self.asked |= in_flight.header.asked
        world_size = in_flight.header.world_size
        share = in_flight.share_of([rank for rank in range(world_size) if rank not in left_out])
        square, sample, changes = in_flight.header.means(share)
        self._spread = torch.stack([square, torch.dot(sample, sample)])
        if left_out:
            warn_of(left_out, self.sync, all_of_them=share == 0)
            mean_N.mul_(world_size / (share or 1.0))
        self._losses.arrived(in_flight.header.loss)
        if self._eager is not None:
            self._eager.before_anchor_moves(fragment)
        if share:
            self._move(fragment, mean_N, average=average, steps=in_flight.header.steps)
        mix = 0.0 if final else self.rule.mix
        if self._eager is not None:
            self._eager.after_anchor_moved(fragment)
        if self._eager is None or final:
            fragment.pull_(mix)
        if changes.numel():
            self.model.buffers.take_(changes, mix)
        if in_flight.fragment == len(self.fragments) - 1 and not self.revocable:
            self.model.compare_buffers()
        if self.sync.ranks.peers.rank in left_out:
            self.model.use_shared()
            self.on_left_out()
        self.num_syncs += 1
        if self._inner is not None:
            rounds = (self.num_syncs - 1) // len(self.fragments) + 1
            self._inner.average(fragment.params, rounds, last=average)
        self.sync.end_step()
        self.on_sync()
        return True

    @torch.no_grad()
    def _move(self, fragment: Fragment, mean_N: Tensor, *, average: bool, steps: float) -> None:
        means, anchors = fragment.views(mean_N), fragment.anchors
        if average:
            torch._foreach_sub_(list(anchors.values()), list(means.values()))
            return
        self._optimizer.step(means, steps)

    # -- which weights the model has --------------------------------------------------------------------------------

    def shared_weights(self) -> contextlib.AbstractContextManager[None]:
        """The model has the anchors inside; may be nested. Once training has ended it stays as it is."""
        return contextlib.nullcontext() if self.finished else self.model.shared()

    def rebase_if_changed(self) -> None:
        """In `shared_weights`, on all ranks, which may have been given other weights: continue from those."""
        if self.model.differs(self.anchors):
            self.model.keep()
            self.rebase()

    def rebase(self) -> None:
        """The weights, equal on all ranks, become the anchors: a new run, or the end of a synchronous part. The outer
        optimizer starts afresh.
        """
        self._in_flight = None
        self._optimizer.restart()
        self.model.rebase()
        if self._eager is not None:
            self._eager.restart()
        self._since = self._next = 0
        self._losses.restart()
        self._every = self.rule.round_length(self.sync.step_index, None)

    # -- saving -----------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """Wait for what is in flight without applying it; before the state is read."""
        if self._in_flight is not None:
            self._in_flight.wait()

    def state_dict(self) -> dict[str, Any]:
        """All of this rank's state, its own weights included; tensors are the live ones."""
        in_flight = self._in_flight
        self.arrive()
        return {
            "rule": to_plain("outer", self.rule),
            "every": self._every,
            "wanted": self.every,
            "turn": self._next,
            "since": self._since,
            "rates": list(self._rates),
            "losses": self._losses.state_dict(),
            "num_turns": self.num_syncs,
            "anchors": self.anchors,
            "optimizer class": self._optimizer.kind,
            "optimizer": self._optimizer.state_dict(),
            "weights": self.model.own_weights,
            "eager": None if self._eager is None else self._eager.state_dict(),
            "buffers": self.model.state_of_buffers(),
            "flight": None if in_flight is None else in_flight.state_dict(self.fragments),
        }

    def owns(self, state: Mapping[str, Any]) -> bool:
        """Whether this rank saved `state`, where its rank number cannot tell."""
        return True

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], *, own: bool = True) -> None:
        """Args:
        state: From `state_dict`.
        own: It is this rank's own. If not (another number of ranks), or under another rule, only what all ranks share
            is taken: anchors, outer optimizer. A new round starts from the anchors.
        """
        same_rule = state.get("rule") == to_plain("outer", self.rule)
        same_optimizer = state.get("optimizer class") == self._optimizer.kind
        if not same_rule and self.sync.ranks.rank == 0:
            _log.warning(
                "the checkpoint was written under another outer rule: a new round begins from the anchors, which all"
                " ranks share%s",
                "" if same_optimizer else "; the outer optimizer starts anew, it is of another class",
            )
        for name, anchor in self.anchors.items():
            if name in state["anchors"]:
                anchor.copy_(state["anchors"][name])
                self._optimizer.load(name, state["optimizer"].get(name, {}) if same_optimizer else {})
        own &= same_rule
        self._losses.load_state_dict(state["losses"], own=own)
        self._in_flight = InFlight.from_state(state["flight"], self.fragments, self.sync.device) if same_rule else None
        self.model.buffers.load_state_dict(state["buffers"], own=own)
        if not own:
            self.apply(final=True)
            self._in_flight, self._since, self._next = None, 0, 0
            self.model.use_shared()
            return
        self._since = state["since"]
        self._continue_round(state)
        self.model.use(state["weights"])
        if self._eager is not None:
            self._eager.load_state_dict(state["eager"])

    def _continue_round(self, state: Mapping[str, Any]) -> None:
        """At the fragment at which it was saved."""
        self._every, self._next = state["every"], state["turn"] % len(self.fragments)
        self.num_syncs, self.every = state["num_turns"], state["wanted"]
        earlier, last = state["rates"]
        self._rates = (earlier, last)
