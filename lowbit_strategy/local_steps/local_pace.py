"""The pace of a session whose ranks take local steps: when a step ends, and what a rank saves."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lowbit_strategy.attach.pace import Pace
from lowbit_strategy.collectives.comm import Comm, GroupComm, gathered
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.hooks.runners import BucketRunner, bucket_runner
from lowbit_strategy.local_steps.cut_again import cut_again
from lowbit_strategy.local_steps.outer_sync import OuterSync
from lowbit_strategy.local_steps.own_optimizers import OwnOptimizers
from lowbit_strategy.local_steps.paused_ddp import PausedDDP
from lowbit_strategy.local_steps.rule import OuterRule
from lowbit_strategy.model.differing import differing
from lowbit_strategy.model.parameters import canonical_name, named_parameters, trainable_parameters
from lowbit_strategy.ranks.groups import group_with
from lowbit_strategy.ranks.ranks import Ranks

if TYPE_CHECKING:
    from lowbit_strategy.attach.session import Session

_log = logging.getLogger("lowbit_strategy")


class LocalSteps(Pace):
    """Connects the session and `OuterSync`.

    Args:
        module: The model, the same on all ranks of `sync`.
        sync: Engine of the model; nothing else uses its group between steps.
        rule: Decides when and how ranks synchronize.
        make_outer: Makes the object that synchronizes.

    Attributes:
        outer: Synchronizes; None in a rule's synchronous part.
        inside: The ranks of this replica, which decide together; None: it is one rank.
    """

    serves_replaced = False

    def __init__(
        self,
        module: nn.Module,
        sync: GradientSync,
        rule: OuterRule,
        *,
        make_outer: Callable[..., OuterSync] = OuterSync,
    ) -> None:
        self.sync = sync
        self.rule = rule
        self._params = trainable_parameters(module)
        self._module = module
        self._ddp = PausedDDP()
        self._runner: BucketRunner | None = None  # set if training continues while fragments travel
        if rule.delay_of(rule.shortest_turn):
            self._runner = bucket_runner(sync.device)
        self._own = OwnOptimizers()
        self._outer_of = make_outer
        self.on_forward = self.begin_forward
        self.is_in_use = True
        self._loaded: tuple[Mapping[str, Any], bool] | None = None
        self.outer: OuterSync | None = None
        self._compressor = sync.compressor  # compressor of pseudo-gradients
        self._validated = (sync.step_index, 0)  # step and number of turns at the last validation
        self._warned = False
        self.inside = _inside(sync.ranks, sync.device)
        sync.save_per_rank("outer", self)
        sync.reduce_for(None)
        if rule.is_local(0):
            self._start()
        elif rule.synchronous_compressor is not None:
            sync.use(rule.synchronous_compressor)

    def bind(self, optimizers: Callable[[], Sequence[Optimizer]], scaler: Callable[[], Any]) -> None:
        self._own.bind(optimizers, scaler)

    @property
    def replica(self) -> Any:
        return None if self.outer is None else self.outer.replica

    def attached(self, session: Session, model: nn.Module) -> None:
        self.on_forward = session.begin_forward
        if isinstance(model, DistributedDataParallel):
            self.wrapped_by(model)
        else:
            _before_forward(model, self)
        if self.outer is not None:
            self.outer.attached(session, self._module)

    def begin_backward(self, loss: Tensor | None) -> None:
        if self.outer is not None:
            self.outer.begin_backward(loss)

    def weights_replaced(self) -> None:
        """Continue from the model's current weights. Called inside `shared_weights`, on all ranks."""
        if self.outer is not None:
            self.outer.rebase_if_changed()

    def _buffers(self) -> dict[str, Tensor]:
        """The model's buffers and frozen parameters."""
        buffers = ((canonical_name(name), buffer) for name, buffer in self._module.named_buffers())
        found = (*buffers, *named_parameters(self._module))
        return {name: tensor for name, tensor in found if name not in self._params}

    def wrapped_by(self, model: DistributedDataParallel) -> None:
        self._ddp.wraps(model)
        _before_forward(model, self)

    def _start(self) -> OuterSync:
        """Begin local steps."""
        if self.rule.synchronous_compressor is not None:
            self.sync.use(self._compressor)
        self.outer = outer = self._make_outer()
        self._ddp.pause()
        return outer

    def _follow_loaded_step(self) -> None:
        """Synchronize gradients again if the loaded state belongs to the synchronous part."""
        if self.outer is None or self.rule.is_local(self.sync.step_index):
            return
        self.outer = None
        self.sync.reduce_for(None)
        if self.rule.synchronous_compressor is not None:
            self.sync.use(self.rule.synchronous_compressor)
        self._ddp.go_on()

    def _make_outer(self) -> OuterSync:
        outer = self._outer_of(
            self.sync, self._params, self.rule, buffers=self._buffers, runner=self._runner, inside=self.inside
        )
        outer.on_left_out = self._own.forget_moments
        return outer

    def extend(self, params: Mapping[str, nn.Parameter]) -> None:
        """Also train parameters that `sync` already knows. They may differ between ranks.

        Raises:
            RuntimeError: Replicas come and go, and the others would not know these parameters.
        """
        if self.outer is not None:
            self.outer.check_extendable()
        self._params |= dict(params)
        if self.outer is not None:
            self.outer.apply()
            state = self.outer.state_dict()
            self.outer = self._make_outer()
            self.outer.load_state_dict(state | {"weights": {}})  # the model has them, and may run backward next
            if differing(params, self.sync.ranks.peers, self.sync.device):
                self.outer.model.rebase_on_mean(params)

    def after_optimizer(self, optimizer: Optimizer | None) -> None:
        """Called when an optimizer has stepped, or a scaler has skipped its step. None: the only optimizer.

        The step ends when all optimizers have stepped, or at the latest when training continues (`begin_forward`).
        Synchronizing earlier would change weights that the others' forward passes have used.

        Raises:
            DivergenceError: On every rank, if anchors were compared after this step and differ.
        """
        if optimizer is None or self._own.all_have_stepped(optimizer):
            self._end_step()

    def begin_forward(self) -> None:
        """End the step if any optimizer has stepped, because a forward pass in training begins."""
        if self._own.has_stepped:
            self._end_step()
        self._ddp.keep_paused()

    def _end_step(self) -> None:
        self._own.begin_step()
        if self.outer is not None:
            self.outer.after_step(self.sync.learning_rates.first_rate())
        elif self.rule.is_local(self.sync.step_index):
            self._start().model.buffers.align(self.sync.ranks.peers, self.sync.device)

    def _before_validation(self) -> None:
        """Warn once if ranks have not synchronized since the last validation, so that this one sees old weights."""
        if self.outer is None:
            return
        now = (self.sync.step_index, self.outer.num_syncs)
        before, self._validated = self._validated, now
        if self._warned or now[0] == before[0] or now[1] > before[1]:
            return
        self._warned = True
        if self.sync.ranks.logs:
            _log.warning(
                "this validation sees the weights of optimizer step %d: the ranks have since trained %d steps"
                " separately, without a synchronization (a round is %d steps). Validate less often than a round, or"
                " give outer a smaller every; otherwise early stopping and the choice of the best checkpoint use old"
                " weights",
                before[0],
                now[0] - before[0],
                self.outer.round_length,
            )

    def close(self) -> bool:
        """Return whether the worker has stopped."""
        self.is_in_use = False
        if self.outer is not None:
            self.outer.leave()
        return self._runner is None or self._runner.close()

    def finish(self) -> None:
        """End training; see `OuterSync.finish`."""
        self.begin_forward()
        if self.outer is not None:
            self.outer.finish()

    @contextlib.contextmanager
    def shared_weights(self, *, validates: bool) -> Iterator[None]:
        """A context in which the model has the anchors."""
        if self.outer is None:
            yield
            return
        if validates:
            self._before_validation()
        with self.outer.shared_weights():
            yield

    # -- saving -----------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """Wait for exchanges that are under way, before the engine's state is read."""
        if self.outer is not None:
            self.outer.arrive()

    def state_dict(self) -> dict[str, Any]:
        return {"outer": None} if self.outer is None else {"outer": self.outer.state_dict(), **self._own.state_dict()}

    def load_state_dict(self, states: Iterable[Mapping[str, Any]], *, own: bool) -> None:
        """Keep the states until `resume`, when the framework has loaded the model and the optimizers."""
        rest = iter(states)
        state = next(rest)
        if not own and state["outer"] is not None:
            state = {**state, "outer": cut_again(self.sync, state["outer"], (each["outer"] for each in rest))}
        self._loaded = (state, own)
        if state["outer"] is not None and self.outer is None:
            self._start()
        self._follow_loaded_step()

    def forget(self) -> None:
        self._loaded = None

    def resume(self) -> None:
        """When the framework has loaded everything, or training begins, continue from this rank's own weights and
        optimizers if they were loaded, otherwise from the model's weights, which all ranks share.
        """
        loaded, self._loaded = self._loaded, None
        self._follow_loaded_step()
        self._own.begin_step()
        if self.outer is None:
            return
        self._restore(loaded)
        self.outer.join()

    def _restore(self, loaded: tuple[Mapping[str, Any], bool] | None) -> None:
        assert self.outer is not None
        self.outer.rebase()
        if loaded is None or loaded[0]["outer"] is None:
            return
        state, own = loaded[0], loaded[1] and self.outer.owns(loaded[0]["outer"])
        self.outer.load_state_dict(state["outer"], own=own)
        if own:
            self._own.load_state_dict(state)

    def adopt(self, earlier: Any) -> None:
        """Continue with the state of an earlier attachment of the same model. If that has finished, and the
        model's weights have changed since, training begins with the new ones.
        """
        if not isinstance(earlier, LocalSteps):
            return
        done = earlier.sync  # its steps tell the rule whether the next one is local
        self.sync.restore_progress(step_index=done.step_index, num_skipped=done.num_skipped, loss_scale=done.loss_scale)
        self.load_state_dict([earlier.state_dict() | {"own": {}}], own=False)
        if self.outer is None or earlier.outer is None or not earlier.outer.finished:
            return
        if self.outer.model.differs(earlier.outer.anchors):
            self._loaded = None


def _inside(ranks: Ranks, device: torch.device) -> Comm | None:
    """The ranks that share one replica, by FSDP2 or another mesh dim; None: one rank. Call it on all ranks."""
    if ranks.everyone.world_size == ranks.world_size or ranks.comes_and_goes:
        return ranks.intra_node
    group = ranks.everyone.group
    members = dist.get_process_group_ranks(group)
    places = gathered(ranks.peers.rank, group)
    own = [rank for rank, place in zip(members, places, strict=True) if place == ranks.peers.rank]
    return GroupComm(group_with(own, None, device))


def _before_forward(model: nn.Module, steps: LocalSteps) -> None:
    """Call `on_forward` before any other pre-hook of a forward pass in training, as long as `steps` is alive."""
    reference = weakref.ref(steps)

    @torch.compiler.disable
    def begin(module: nn.Module, _: Any) -> None:
        found = reference()
        if found is not None and found.is_in_use and module.training and torch.is_grad_enabled():
            found.on_forward()

    model.register_forward_pre_hook(begin, prepend=True)
