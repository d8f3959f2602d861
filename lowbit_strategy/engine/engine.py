"""Gradient synchronization of one model on one rank, step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import StepContext
from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.collectives.step_flags import StepFlags
from lowbit_strategy.collectives.wire_buffers import WireBuffers
from lowbit_strategy.engine.backward_pass import call_after_end, in_backward
from lowbit_strategy.engine.bucket import Bucket, BucketContext, BucketLayout, BucketObserver
from lowbit_strategy.engine.bucket_schedule import Stages
from lowbit_strategy.engine.collector import Collector
from lowbit_strategy.engine.learning_rates import LearningRates
from lowbit_strategy.engine.listeners import Listeners, StepPhase
from lowbit_strategy.engine.method_state import MethodState
from lowbit_strategy.engine.node_means import NodeMeans
from lowbit_strategy.engine.rounds import Rounds
from lowbit_strategy.engine.saved_state import RankState, Stateful
from lowbit_strategy.engine.transactions import Transactions
from lowbit_strategy.engine.weight_sync import WeightSync
from lowbit_strategy.kernels.reference.rng import GOLDEN, hash32
from lowbit_strategy.methods._base.compressor import Assignment, Compressor
from lowbit_strategy.ranks.ranks import Ranks

_KEPT_NOTES = 1000
_KEPT_STEPS = 16  # a bucket layout not seen for this many steps (DDP has rebuilt its buckets) is dropped


class GradientSync:
    """Turns buckets of local gradients into buckets of mean gradients.

    A step is one optimizer step, regardless of the number of backward passes in it:

    1. `begin_step`, before each backward pass. In the first one of a step, controllers decide, and parameters whose
       method changes are regrouped
    2. `reduce`, once per bucket: it opens a transaction for each parameter (`Transactions`) and returns stages for the
       hook to run, under DDP on a worker thread or side stream, under FSDP2 in the reduce-scatter stream or overlapped
       with backward (`OverlappedRunner`, `BetweenNodes`)
    3. `commit` the parameters that an optimizer has stepped, or `roll_back` if gradients were discarded
    4. `end_step`, after the optimizer has stepped or a loss scaler has skipped the step

    Args:
        compressor: Gives every parameter its method.
        specs: All trainable parameters, in the same order on all ranks.
        ranks: The ranks that train the model; nothing else may use `Ranks.peers` while buckets are in flight.
        others: The ranks that reduce parameters on a different mesh, such as experts, by parameter name.
        device: Device of gradients.
        sharded: True: FSDP2's reduce-scatter (sum of the owned share). False: DDP's all-reduce (mean).
        seed: The seed of all randomness; the same on all ranks.
        skips_overflow: Whether a step that overflows may be skipped (fp16 with loss scaling); it is then rolled back.
        keeps_copies: Whether state is copied before it changes. Without copies, rolling back resets it.

    Attributes:
        ranks: The ranks that reduce all parameters except those of `others`.
        state: The parameters, their methods, and the methods' state.
        listeners: Objects that are called when steps begin and end.
        bucket_observers: Observers of all buckets in all steps, inside the listeners' observers.
        notes: The latest lines for the run's record: each line's kind and fields.
        step_index: Optimizer steps completed.
        num_skipped: Steps that overflowed.
        weights: Gathers FSDP2's weights; None under DDP.
        node_means: Computes the means inside a node, by the node's ranks.
        extra_state, rank_state: Other state that is saved, by name: the same on all ranks, and different on each.
        learning_rates: Knows the learning rates of the optimizers that step the model.
        rounds: Reduces in rounds, while gradients stay on their rank. None: gradients are reduced.
        has_rounds: Whether there are or will be rounds.
    """

    def __init__(
        self,
        compressor: Compressor,
        specs: Sequence[TensorSpec],
        ranks: Ranks,
        device: torch.device,
        *,
        sharded: bool,
        others: Mapping[str, Ranks] | None = None,
        seed: int = 0,
        skips_overflow: bool = False,
        keeps_copies: bool = True,
    ) -> None:
        self.device, self.sharded, self.seed = device, sharded, seed
        self.skips_overflow, self._may_overflow, self._keeps_copies = skips_overflow, skips_overflow, keeps_copies
        self.step_index = self.num_skipped = 0
        self.weights: WeightSync | None = None
        self.loss_scale: float | None = None
        self.extra_state: dict[str, Stateful] = {}
        self.rank_state: dict[str, RankState] = {}
        self.rounds: Rounds | None = None
        self.has_rounds = False
        self.learning_rates = LearningRates()
        self._begin_late: Callable[[], None] = lambda: None
        self.ranks = ranks
        self.state = MethodState(specs, ranks, device, sharded=sharded, others=others)
        self._bind_ranks()
        self.node_means: dict[Comm, NodeMeans] = {
            each.intra_node: NodeMeans(each.intra_node, device)
            if each.coding is None
            else each.coding.means(self.state, each.intra_node, device)
            for each in self.all_ranks
            if each.intra_node is not None
        }
        self.listeners = Listeners()
        self.bucket_observers: list[BucketObserver] = []
        several = not sharded or any(each.peers.is_far for each in self.all_ranks)
        self.buffers = WireBuffers(device, several=several)
        self.notes: deque[tuple[str, dict[str, Any]]] = deque(maxlen=_KEPT_NOTES)
        self._buckets: dict[BucketLayout, Bucket] = {}
        self._begun = False
        self._entered: set[BucketLayout | str] = set()  # buckets and parameters reduced in the current backward pass
        self._num_passes = 0  # in this step, including the current one
        self._step = StepContext(0, 0, 0)  # the current backward pass
        self._observers: list[BucketObserver] = []
        self._after_backward: Callable[[], None] | None = None
        self.transactions = Transactions(self.state, StepFlags(device), keeps_copies=keeps_copies)
        self.use(compressor)

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return self.state.specs

    @property
    def all_ranks(self) -> list[Ranks]:
        """Every `Ranks` that reduces parameters, `ranks` first, in the same order on all ranks."""
        return self.state.all_ranks

    @property
    def in_parts(self) -> bool:
        """Whether ranks hold different parts of a parameter along mesh dims over which its gradient is not averaged."""
        return any(self.ranks.everyone.world_size > ranks.world_size for ranks in self.all_ranks)

    def summed_in_parts(self, counts: Tensor) -> Tensor:
        """Sum `counts` over the ranks that hold different parts of gradients; return them if there are no parts."""
        if self.sharded or self.weights is not None or self.in_parts:
            self.ranks.everyone.all_reduce(counts).wait()
        return counts

    @property
    def sent_nbytes(self) -> int:
        return sum(each.peers.sent_nbytes for each in self.all_ranks)

    @property
    def compressor(self) -> Compressor:
        return self.state.compressor

    # -- which method reduces what -------------------------------------------------------------------------------------

    def use(self, compressor: Compressor, chosen: Mapping[str, Compressor] | None = None) -> None:
        """Reassign every parameter's method, from `compressor` or from the one `chosen` for it. Residuals are carried
        over. Call it between steps only.
        """
        self._regroup(self.state.use, compressor, chosen or {}, self.step_index)

    def follow_phase(self) -> None:
        """Regroup if a compressor changes its configuration in this step."""
        if self.state.phase_ends_before(self.step_index):
            self._regroup(self.state.follow_phase, self.step_index)

    def extend(self, specs: Sequence[TensorSpec]) -> None:
        """Synchronize more parameters, the same on all ranks; others keep their state. Call it between steps only."""
        if specs:
            self._regroup(self.state.extend, specs)

    def assign(self, assignments: Mapping[str, Assignment]) -> None:
        """Give parameters these methods. Residuals are carried over. Call it between steps only."""
        self._regroup(self.state.assign, assignments)

    def forget(self) -> None:
        """Reset all state; methods stay. Call it between steps only."""
        self._clear_step()
        self._regroup(self.state.forget)

    def renew(self, ranks: Ranks, *, afresh: bool = False) -> None:
        """Reduce with different ranks from the next step on. Call it between steps, on all of them.

        State is kept if this rank's place and the number of peers stay the same. Otherwise, or if `afresh`, state is
        new, and what has not been sent yet becomes its residual. Each rank reduces the same parts of parameters as
        before.
        """
        assert ranks.topology.node_size == self.ranks.topology.node_size
        self.ranks = ranks
        self._regroup(self.state.move, ranks, afresh)
        self._bind_ranks()

    def _bind_ranks(self) -> None:
        for ranks in self.all_ranks:
            for comm in (ranks.peers, ranks.everyone, ranks.intra_node):
                if comm is not None:
                    comm.describe_step = self._describe_step

    def _regroup(self, change: Callable[..., None], *values: Any) -> None:
        """Change methods or their state. This drops all buckets, which hold offsets into the state."""
        self._buckets = {}
        self.transactions.forget()
        change(*values)
        state = self.state
        whole_model = any(method.whole_model for _, method in state.stores)
        self._collector = Collector(list(state.specs)) if whole_model else None
        methods = {name: assignment.method for name, assignment in state.assignments.items()}
        self._contexts = {
            ranks.peers: BucketContext(
                specs=state.specs,
                methods=methods,
                stores={method: store for (peers, method), store in state.stores.items() if peers is ranks.peers},
                comm=ranks.peers,
                device=self.device,
                buffers=self.buffers,
                flags=self.transactions.flags,
                carryover=state.carryover,
                collector=self._collector,
                notes_overflow=self.skips_overflow,
            )
            for ranks in self.all_ranks
        }

    # -- a step --------------------------------------------------------------------------------------------------------

    @property
    def outside_buckets(self) -> list[WeightSync | NodeMeans]:
        """The other senders of messages in a step."""
        return [*([] if self.weights is None else [self.weights]), *self.node_means.values()]

    @property
    def in_step(self) -> bool:
        """Whether anything has been reduced since the last `end_step`."""
        return self._num_passes > 0

    @property
    def has_begun(self) -> bool:
        """Whether `begin_step` has been called since the last `end_step`, and not all of the step was rolled back."""
        return self._begun and not (self.in_step and not self.transactions.open)

    def has_entered(self, layout: BucketLayout) -> bool:
        """Whether this bucket was already reduced in the current backward pass."""
        return layout in self._entered

    def _describe_step(self) -> str:
        return f"optimizer step {self.step_index + 1}" + f", backward pass {self._num_passes}" * (self._num_passes > 1)

    def begin_step(self, loss_scale: float | None = None) -> None:
        """Begin a step, before its first backward pass, on all ranks. Further calls do nothing until the step has
        ended. `loss_scale`: the scale of the coming gradients; residuals are rescaled when it changes. None: unchanged.
        """
        if self.has_begun:
            return
        self.num_skipped += self.in_step and self.skips_overflow  # a whole step was rolled back
        self._clear_step()
        self._begun, self._step = True, self.step_context()
        probes = self.listeners.begin_step(StepPhase.DECIDE)
        self.follow_phase()
        if loss_scale is not None:
            if self.loss_scale is not None and loss_scale != self.loss_scale:
                self.state.rescale_(loss_scale / self.loss_scale)
                self.transactions.rescale_(loss_scale / self.loss_scale)
            self.loss_scale = loss_scale
        # Monitors are innermost, so that the time of controllers' probes is not charged to the methods.
        monitors = self.listeners.begin_step(StepPhase.OBSERVE)
        records = self.listeners.begin_step(StepPhase.RECORD)
        self._observers = [*self.bucket_observers, *monitors, *probes, *records]

    def commit(self, names: Iterable[str] | None = None) -> None:
        """Commit the reductions of these parameters, because optimizers have stepped; None: of all parameters. A step
        that may still be skipped is not committed before `end_step`.
        """
        if not self.skips_overflow:
            self.transactions.commit(names)

    def roll_back(self) -> None:
        """Restore the state as if no step had begun, because all ranks have discarded all reduced gradients."""
        self.transactions.roll_back()
        self._clear_step()

    def has_overflowed(self) -> bool:
        """Whether a pass of the open step gave any rank inf or NaN. Call it on all ranks together."""
        return self.transactions.flags.overflowed(self.ranks.everyone)

    @contextmanager
    def taken_back(self) -> Iterator[None]:
        """A context in which methods have the state from before all open reductions."""
        if self.rounds is not None:  # an exchange that is under way is saved with its rounds
            yield
            return
        with self.transactions.taken_back():
            yield

    def withdraw(self, names: Iterable[str]) -> None:
        """No rank had a gradient for these parameters: undo their reductions of zeros. In rounds this does nothing,
        since open reductions are not of gradients.
        """
        if self.rounds is None:
            self.transactions.withdraw(names)

    def _clear_step(self) -> None:
        self._entered.clear()
        self._begun, self._num_passes, self._observers = False, 0, []
        self._after_backward = None
        if self.skips_overflow:
            self.transactions.flags.clear()

    def reduce(
        self,
        layout: BucketLayout,
        x: Tensor,
        out: Tensor,
        marks: Tensor | None = None,
        *,
        ranks: Ranks | None = None,
    ) -> Stages:
        """Reduce one bucket: a generator that yields while bytes travel, and yields None while waiting for other
        buckets.

        All ranks run the same buckets and advance them in the same order. `x`, `out`, `marks`: see `Bucket.run`.
        `ranks`: the ranks that reduce its parameters; None: the engine's `ranks`.

        Raises:
            RuntimeError: The step has not begun.
        """
        if not self._begun:
            raise RuntimeError(
                "gradients arrived before the step had begun: call session.begin_step() before every backward pass. In"
                " Lightning's manual optimization call self.manual_backward(loss), in Fabric fabric.backward(loss), in"
                " Accelerate accelerator.backward(loss), instead of loss.backward()"
            )
        context = self._contexts[(ranks or self.ranks).peers]
        self._buckets[layout] = bucket = self._buckets.get(layout) or Bucket(context, layout)
        content: set[BucketLayout | str] = {layout, *bucket.names}
        if not self._entered or not self._entered.isdisjoint(content):  # repeated: another backward pass of the step
            self._entered.clear()
            self._num_passes += 1
            if self._num_passes > 1:
                self._step = self.step_context()
            self.buffers.reclaim()
        if self._collector is not None:
            self._collector.announce(first=not self._entered, last=layout.last)
        self._entered |= content
        bucket.last_step = self.step_index
        stages = bucket.run(x, out, self._step, self._observers, marks)
        if kept := self.transactions.to_keep(bucket.ordered_names):
            stages = self._keeping(kept, stages)
        self.transactions.begin(bucket.names)
        if self._after_backward is not None and in_backward():
            call_after_end(self._after_backward)
            self._after_backward = None
        return stages

    def ask_rates_of(self, learning_rates: LearningRates) -> None:
        """Know the learning rates that `learning_rates` knows."""
        self.learning_rates = learning_rates

    def begin_late_with(self, begin: Callable[[], None]) -> None:
        """Call `begin`, which may call `begin_step`, in `gradients_arrive`."""
        self._begin_late = begin

    def gradients_arrive(self) -> None:
        """Note that DDP has the first gradients of a pass."""
        self._begin_late()

    def call_after_backward(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when the next backward pass that reduces has ended."""
        self._after_backward = callback

    def reduced_outside(self) -> None:
        """Call this after reducing gradients, or some of them, outside a backward pass, as a pipeline does after its
        last micro-batch.
        """
        if self._after_backward is not None:
            self._after_backward()

    def _keeping(self, names: tuple[str, ...], stages: Stages) -> Stages:
        """Keep copies of these parameters' state before `stages` change it."""
        self.transactions.keep(names)
        yield from stages

    def step_context(self) -> StepContext:
        """Counter and seeds of the current backward pass."""
        shared = hash32(hash32(self.seed) + self.step_index)
        if self._num_passes > 1:
            shared = hash32(shared + self._num_passes)
        return StepContext(self.step_index, hash32(shared + GOLDEN * (self.ranks.rank + 1)), shared)

    def end_step(self, stepped: Iterable[str] | None = None) -> bool:
        """End the step after the optimizer has stepped or a loss scaler has skipped the step. Call this on all ranks.

        Errors and the return value are those of `end_step_alone`.
        """
        counted = self.end_step_alone(stepped)
        self.weights_changed()
        self.listeners.all_have_ended()
        return counted

    def weights_changed(self) -> None:
        """Under FSDP2, let the next gather send weights, because an optimizer has stepped. Call it on all ranks."""
        if self.weights is not None:
            self.weights.invalidate()

    def end_step_alone(self, stepped: Iterable[str] | None = None) -> bool:
        """The part of `end_step` that this rank does alone; with a loss scaler that may skip the step, all ranks call
        it.

        Args:
            stepped: The parameters that were stepped, or would have been without a skip; None: all.

        Returns:
            Whether the step counted: False if it overflowed and was rolled back.

        Raises:
            RuntimeError: On CUDA: in an earlier step a rank sent a message with a different layout.
        """
        entered, counted = self.in_step, True
        for part in self.outside_buckets:
            part.end_step()
        if entered and self.skips_overflow:
            counted = not self.transactions.flags.overflowed(self.ranks.everyone)
        self.transactions.flags.raise_if_broken(self.ranks.rank)
        if counted:
            self.transactions.commit(stepped)
        else:
            self.num_skipped += 1
            self.roll_back()
        if self.rounds is None and (entered or self.ranks.alone):  # a second optimizer may have stepped
            self.step_index += counted
        self._clear_step()
        self.state.replaced = []
        oldest = self.step_index - _KEPT_STEPS * self.steps_per_reduction
        self._buckets = {layout: bucket for layout, bucket in self._buckets.items() if bucket.last_step >= oldest}
        if entered:
            self.listeners.end_step(counted=counted)
        return counted

    # -- rounds --------------------------------------------------------------------------------------------------------

    @property
    def steps_per_reduction(self) -> int:
        """Optimizer steps since the previous reduction."""
        return 1 if self.rounds is None else self.rounds.stride

    def reduce_for(self, rounds: Rounds | None) -> None:
        """From now on, reduce what `rounds` provides instead of gradients. None: rounds begin later, and gradients are
        reduced in every step.
        """
        self.has_rounds = True
        changes, self.rounds = (rounds is None) != (self.rounds is None), rounds
        self.skips_overflow = self._may_overflow and rounds is None
        self.transactions.keeps_copies = self._keeps_copies and (rounds is None or rounds.revocable)
        if rounds is not None:
            self.loss_scale = None
        if changes:
            self.forget()

    def count_step(self) -> None:
        """Count an optimizer step that reduces nothing, in rounds."""
        self.step_index += 1

    # -- what is saved -------------------------------------------------------------------------------------------------

    def serve_weights(self, weights: WeightSync) -> None:
        """Send FSDP2's weights through `weights`, which follows the engine's steps and is saved with the engine."""
        self.weights = weights
        self.save_per_rank("weights", weights)

    def save_with(self, name: str, part: Stateful) -> None:
        """Save and restore `part`, the same on all ranks, with the residuals."""
        self.extra_state[name] = part

    def save_per_rank(self, name: str, part: RankState) -> None:
        """Save and restore state that differs between ranks."""
        self.rank_state[name] = part

    def restore_progress(self, *, step_index: int, num_skipped: int, loss_scale: float | None) -> None:
        """Continue at the step of a checkpoint; the compressor's phase follows."""
        self.step_index, self.num_skipped, self.loss_scale = step_index, num_skipped, loss_scale
        self.follow_phase()
