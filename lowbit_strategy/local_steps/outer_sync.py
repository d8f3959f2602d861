"""Local steps with an outer optimizer on one rank: when fragments synchronize, and how anchors are updated."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.engine.bucket_schedule import Stages
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.hooks.runners import BlockingRunner, BucketRunner
from lowbit_strategy.local_steps.anchor_optimizer import AnchorOptimizer, EagerUpdate
from lowbit_strategy.local_steps.anchored_model import AnchoredModel
from lowbit_strategy.local_steps.averaged_buffers import AveragedBuffers
from lowbit_strategy.local_steps.cutting import cut_into
from lowbit_strategy.local_steps.fragment import Fragment
from lowbit_strategy.local_steps.fragment_sync import FragmentSync
from lowbit_strategy.local_steps.header import Header
from lowbit_strategy.local_steps.interval import Interval
from lowbit_strategy.local_steps.rule import OuterRule
from lowbit_strategy.local_steps.turns import Turns
from lowbit_strategy.model.fingerprint import to_plain
from lowbit_strategy.ranks.ranks import Ranks

if TYPE_CHECKING:
    from lowbit_strategy.attach.session import Session
    from lowbit_strategy.local_steps.local_round_plan import LocalRoundPlan

_log = logging.getLogger("lowbit_strategy")


class OuterSync:
    """Local steps on one rank. Fragments synchronize one after another, and the outer optimizer moves their anchors.

    A fragment's synchronization, on each rank when it reaches it:

    1. a header of about a kilobyte (`Header`) is summed over ranks without compression: a sample of the
       pseudo-gradient, changes of buffers, and whether the rank's weights are finite. If they are not, the rank sends
       zeros
    2. the pseudo-gradient goes through `GradientSync.reduce`
    3. `OuterRule.delay_of` steps later the outer optimizer steps the anchor with the mean over the finite ranks, and
       the weights follow. A rank that was not finite continues from the anchors of all fragments

    The order of fragments is the same on all ranks and nothing else here is collective, so ranks may train at different
    speeds, and a rank without more data takes part until all are done (`finish`).

    Args:
        sync: Reduces pseudo-gradients. Its steps are counted here.
        params: All parameters by the names that `sync` knows, in the order in which they are cut into fragments.
        rule: Decides when ranks synchronize, and with which optimizer.
        buffers: Returns the model's buffers and frozen parameters by name; see `AveragedBuffers`.
        runner: Sends fragments to the other ranks.
        inside: The ranks of a replica, which decide together; None: it is one rank.

    Attributes:
        every: Optimizer steps of each coming round, in place of the rule's; None: as the rule says.
        turns: Decides when each fragment is sent.
        num_syncs: Fragment synchronizations completed.
        asks: Whether this rank wants all ranks to do something together after a synchronization.
        asked: Whether a rank has asked in a completed one; the same on all ranks.
        finished: Whether `finish` has been called since the last step; then the model belongs to the user.
        on_left_out: Called after this rank was left out of a synchronization, with the anchors in the model.
        weights: Each rank's weight, 1 on average; empty: all 1.
        replica: This object, if replicas join and leave; otherwise None.
    """

    revocable: ClassVar[bool] = False
    turns_of: ClassVar[type[Turns]] = Turns
    replica: Any = None

    def __init__(
        self,
        sync: GradientSync,
        params: Mapping[str, Tensor],
        rule: OuterRule,
        *,
        buffers: Callable[[], Mapping[str, Tensor]] = dict,
        runner: BucketRunner | None = None,
        inside: Comm | None = None,
    ) -> None:
        self.sync = sync
        self.rule = rule
        self.inside = inside
        self.every: int | None = None
        self.num_syncs = 0
        self.asks: Callable[[], bool] = bool
        self.asked = False
        self.on_left_out: Callable[[], None] = lambda: None
        self.weights: tuple[float, ...] = ()
        self._runner = BlockingRunner() if runner is None else runner
        specs = [sync.specs[name] for name in params if name in sync.specs]
        own = [[each for each in specs if sync.state.ranks_of(each.name) is ranks] for ranks in sync.all_ranks]
        parts = itertools.zip_longest(*(cut_into(each, rule.fragments) for each in own), fillvalue=())
        fragments = [Fragment(part, params) for part in parts]
        self.model = AnchoredModel(fragments, AveragedBuffers(buffers), sync, inside)
        self._optimizer = AnchorOptimizer(rule, self.anchors)
        self._eager = EagerUpdate(rule, self.fragments, sync.ranks.peers.world_size) if rule.eager else None
        self._in_flight: FragmentSync | None = None
        self.turns = self.turns_of(rule, len(self.fragments), sync.device, sync.step_index)
        self.finished = False
        self._spread: Tensor | None = None
        sync.reduce_for(self)

    def join(self) -> None:
        """Meet the other ranks before training. Here all are present from the start."""

    def leave(self) -> None:
        """Called when training has ended on this rank."""

    def attached(self, session: Session, module: nn.Module) -> None:
        """Called when the session around the model is complete."""

    def check_extendable(self) -> None:
        """Raise a RuntimeError if parameters cannot be added."""

    @property
    def anchors(self) -> dict[str, Tensor]:
        """The shared weights by name, float32."""
        return self.model.anchors

    @property
    def shared(self) -> Mapping[str, Tensor]:
        return ChainMap(self.anchors, self.model.buffers.shared)

    @property
    def fragments(self) -> list[Fragment]:
        return self.model.fragments

    @property
    def stride(self) -> int:
        return self.turns.stride

    @property
    def round_length(self) -> int:
        """Optimizer steps of the current round."""
        return self.turns.round_length

    def planned(self, ranks: Ranks) -> LocalRoundPlan:
        """The plan of the current round for the parameters that `ranks` reduce; the first `Ranks` send the header."""
        return replace(self.rule.planned(self.round_length), has_header=ranks is self.sync.ranks)

    @property
    def drift(self) -> float | None:
        """How far ranks had drifted apart before the last synchronization, from a sample: the root mean square of their
        distances from the mean, in units of the mean movement. None before the first one. Reading it waits for the
        device.
        """
        if self._spread is None:
            return None
        each, mean = self._spread.tolist()
        return (max(0.0, each - mean) / mean) ** 0.5 if mean > 0 else 0.0

    # -- steps ------------------------------------------------------------------------------------------------------

    def begin_backward(self, loss: Tensor | float | None = None) -> None:
        """Called when a backward pass begins. `loss`: its batch's loss, for rounds that depend on it."""
        if loss is not None and isinstance(self.rule.every, Interval):
            self.turns.losses.observe(loss)  # does not wait for the device

    def after_step(self, learning_rate: float | None = None) -> None:
        """Call this on all ranks when the inner optimizer has stepped, or a loss scaler has skipped the step.

        Args:
            learning_rate: Learning rate of the inner optimizer.
        """
        self.sync.count_step()
        self.turns.step(learning_rate)
        self.finished = False
        if self._in_flight is not None:
            self._in_flight.age += 1
            self._apply_if_due()
        if self.turns.since >= self.turns.interval:
            self.apply()  # a fragment is still in flight, because rounds have become shorter
            self._launch(done=False)
            self._apply_if_due()

    def finish(self) -> None:
        """End training on this rank: steps since the last synchronization are averaged into the anchors.

        Call it on each rank when it is done. Until all ranks are done, this rank takes part in the others'
        synchronizations. Then each fragment has a last one, which takes the mean of the weights without the outer
        optimizer.
        """
        if self.finished:
            return
        self.apply()
        all_done = False
        while not all_done:
            in_flight = self._launch(done=True)
            in_flight.wait()
            all_done = in_flight.header.all_done
            self.apply(final=True, average=all_done)
        for _ in range(len(self.fragments) - 1):
            self._launch(done=True)
            self.apply(final=True, average=True)
        self.finished = True

    def _launch(self, *, done: bool) -> FragmentSync:
        """Send the next fragment."""
        sync, turns = self.sync, self.turns
        is_last, fragment = turns.is_last, self.fragments[sent := turns.begin()]
        if self.rule.pulls_before_sending:
            fragment.pull_(self.rule.mix)
        x_N, header = self._own_part(fragment, done=done, with_buffers=is_last)
        if self._eager is not None and not done:
            self._eager.before_sending(fragment, x_N)
        sync.begin_step()  # controllers decide here
        arrivals = [self._runner.submit(self._summed(header.flat), result=header.flat, last=False)]
        turns.advance(sync.step_index, self.every)
        for place, layout, part in fragment.buckets:
            x = x_N[part]
            stages = sync.reduce(layout, x, x, ranks=sync.all_ranks[place])
            arrivals.append(self._runner.submit(stages, result=x, last=layout.last))
        delay = self.rule.delay_of(turns.interval)
        self._in_flight = FragmentSync(sent, fragment, x_N, header, delay, weights=self.weights, arrivals=arrivals)
        return self._in_flight

    def _own_part(self, fragment: Fragment, *, done: bool, with_buffers: bool) -> tuple[Tensor, Header]:
        """This rank's pseudo-gradient, times its weight, and the header; zeros if they are not finite."""
        peers = self.sync.ranks.peers
        x_N = fragment.pseudo_gradient()
        finite, asks, loss = self._agreed(x_N)
        changes = self.model.buffers.changes() if with_buffers else []
        weight = self.weights[peers.rank] if self.weights else 1.0
        for mine in (x_N, *changes):
            mine.masked_fill_(finite == 0, 0.0)
            if weight != 1.0:
                mine.mul_(weight)
        facts, sample = torch.stack([torch.full_like(loss, done), asks, loss]), x_N[fragment.sample]
        header = Header.of_rank(
            peers.rank, peers.world_size, facts=facts, finite=finite, sample=sample, changes=changes
        )
        return x_N, header

    def _agreed(self, x_N: Tensor) -> Tensor:
        """The joint report of this replica's ranks: 1 if all are finite, whether one asks, the mean loss (or NaN)."""
        loss = self.turns.losses.take()
        facts = torch.tensor([0.0, self.asks(), torch.nan], device=x_N.device)
        if x_N.numel():
            facts[0] = 1.0 - torch.stack(torch.aminmax(x_N)).isfinite().all().float()
        if loss is not None:
            facts[2] = loss
        if self.inside is not None:
            self.inside.all_reduce(facts).wait()
            facts[2] /= self.inside.world_size
        return torch.cat([(facts[:1] == 0).float(), (facts[1:2] > 0).float(), facts[2:]])

    def _summed(self, flat: Tensor) -> Stages:
        yield self.sync.ranks.peers.all_reduce(flat)

    def _apply_if_due(self) -> None:
        if self._in_flight is not None and self._in_flight.age >= self._in_flight.delay:
            self.apply()

    def apply(self, *, final: bool = False, average: bool = False) -> None:
        """Apply the fragment in flight, if there is one. Call it on all ranks at the same point.

        Args:
            final: The weights become the anchor, without mixing in the rank's own.
            average: Take the mean of the weights, without the outer optimizer.
        """
        if self._in_flight is None:
            return
        in_flight, self._in_flight = self._in_flight, None
        in_flight.wait()
        fragment, header, mix = in_flight.fragment, in_flight.header, 0.0 if final else self.rule.mix
        self.asked |= header.asked
        left_out = header.left_out
        share = in_flight.share_without(left_out)
        square, sample, changes = header.means(share)
        self._spread = torch.stack([square, torch.dot(sample, sample)])
        if left_out:
            self._warn_of(left_out, all_of_them=share == 0)
            in_flight.x.mul_(header.world_size / (share or 1.0))
        self.turns.losses.arrived(header.loss)
        if header.loss is None and not (self.num_syncs or final):
            self._warn_of_unknown_loss()
        with contextlib.nullcontext() if self._eager is None else self._eager.moving_with(fragment):
            if share:
                self._move(in_flight, average=average)
        if final or not (self._eager or self.rule.pulls_before_sending):
            fragment.pull_(mix)
        if changes.numel():
            self.model.buffers.take_(changes, mix)
        if in_flight.place == len(self.fragments) - 1 and not self.revocable:
            self.model.compare_buffers()
        if self.sync.ranks.peers.rank in left_out:
            self.model.use_shared()
            self.on_left_out()
        self.num_syncs += 1
        self.sync.end_step()

    @torch.no_grad()
    def _move(self, arrived: FragmentSync, *, average: bool) -> None:
        fragment = arrived.fragment
        means = fragment.views(arrived.x)
        if average:
            torch._foreach_sub_(list(fragment.anchors.values()), list(means.values()))
        else:
            self._optimizer.step(means)

    def _warn_of(self, left_out: Sequence[int], *, all_of_them: bool) -> None:
        """Log on one rank that these ranks' weights were not finite."""
        if not self.sync.ranks.logs:
            return
        which = "rank" if self.inside is None else "replica"
        _log.warning(
            "weights that are not finite at optimizer step %d, on %s: %s, and they start again from the anchors, with a"
            " fresh optimizer state",
            self.sync.step_index,
            ", ".join(f"{which} {rank}" for rank in left_out),
            "the anchors stay as they are" if all_of_them else "the others continue without them",
        )

    def _warn_of_unknown_loss(self) -> None:
        """Log on one rank that rounds will not follow the loss, if they should."""
        if self.sync.ranks.logs and isinstance(self.rule.every, Interval) and self.rule.every.needs_loss:
            _log.warning(
                "%s decides by the loss, which a rank did not know in the first round: rounds keep their length until"
                " it does. In plain PyTorch call session.begin_step(loss=loss) before every backward pass",
                type(self.rule.every).__name__,
            )

    # -- switching the model's weights ------------------------------------------------------------------------------

    def shared_weights(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the model has the anchors; may be nested. Once training has ended it changes nothing."""
        return contextlib.nullcontext() if self.finished else self.model.shared()

    def rebase_if_changed(self) -> None:
        """Continue from new weights, if the ranks were given any. Called inside `shared_weights`, on all ranks."""
        if self.model.differs(self.anchors):
            self.model.keep()
            self.rebase()

    def rebase(self) -> None:
        """Make the weights, which are equal on all ranks, the anchors, at the start of a run or the end of a
        synchronous part. The outer optimizer starts over.
        """
        self._in_flight = None
        self._optimizer.restart()
        self.model.rebase()
        if self._eager is not None:
            self._eager.restart()
        self.turns.restart(self.sync.step_index)

    # -- saving -----------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """Wait for fragments in flight without applying them, before the state is read."""
        if self._in_flight is not None:
            self._in_flight.wait()

    def state_dict(self) -> dict[str, Any]:
        """All of this rank's state, including its own weights; tensors are not copied."""
        in_flight = self._in_flight
        self.arrive()
        return {
            "rule": to_plain("outer", self.rule),
            "wanted": self.every,
            **self.turns.state_dict(),
            "num_turns": self.num_syncs,
            "anchors": self.anchors,
            "optimizer class": self._optimizer.kind,
            "optimizer": self._optimizer.state_dict(),
            "weights": self.model.own_weights,
            "eager": None if self._eager is None else self._eager.state_dict(),
            "buffers": self.model.state_of_buffers(),
            "flight": None if in_flight is None else in_flight.state_dict(),
        }

    def owns(self, state: Mapping[str, Any]) -> bool:
        """Whether this rank saved `state`, if its rank number cannot tell."""
        return True

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], *, own: bool = True) -> None:
        """Restore the state.

        Args:
            state: From `state_dict`.
            own: Whether it is this rank's own. If not (the number of ranks has changed), or if the rule has changed,
                only the shared state is used (anchors, outer optimizer), and a new round starts from the anchors.
        """
        same_rule = state.get("rule") == to_plain("outer", self.rule)
        same_optimizer = state.get("optimizer class") == self._optimizer.kind
        if not same_rule and self.sync.ranks.logs:
            _log.warning(
                "the checkpoint was written with a different outer rule: a new round begins from the anchors, which all"
                " ranks share%s",
                "" if same_optimizer else "; the outer optimizer starts over, because its class has changed",
            )
        for name, anchor in self.anchors.items():
            if name in state["anchors"]:
                anchor.copy_(state["anchors"][name])
                self._optimizer.load(name, state["optimizer"].get(name, {}) if same_optimizer else {})
        own &= same_rule
        self.turns.losses.load_state_dict(state["losses"], own=own)
        self._in_flight = FragmentSync.from_state(state["flight"], self.fragments) if same_rule else None
        self.model.buffers.load_state_dict(state["buffers"], own=own)
        if not own:
            self.apply(final=True)
            self._in_flight = None
            self.turns.begin_round()
            self.model.use_shared()
            return
        self.turns.since = state["since"]
        self._continue_round(state)
        self.model.use(state["weights"])
        if self._eager is not None:
            self._eager.load_state_dict(state["eager"])

    def _continue_round(self, state: Mapping[str, Any]) -> None:
        """Continue the round at the fragment at which it was saved."""
        self.turns.load_state_dict(state)
        self.num_syncs, self.every = state["num_turns"], state["wanted"]
