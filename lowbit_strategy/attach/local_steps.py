"""Local steps of one attached model: when a step is one, DDP's part in it, what each rank saves for itself."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lowbit_strategy.attach.digest import ParameterDigest
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.hooks.worker import BucketWorker, SideStream
from lowbit_strategy.methods.outer.rule import OuterRule
from lowbit_strategy.model.parameters import canonical_name, trainable_parameters
from lowbit_strategy.rounds.fragment import local_part
from lowbit_strategy.rounds.outer import AsyncReducer, OuterSync

STATE_KEY = "outer"

_log = logging.getLogger("lowbit_strategy")


class Stateful(Protocol):
    """An optimizer or a gradient scaler."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class LocalSteps:
    """Between the adapter of a framework and `OuterSync`.

    Args:
        sync: Of the model; its group is used by nothing else between steps.
        rule: When ranks synchronise, and how.
        params: By the names that `sync` knows.
        buffers: Gives those of the model, by name.
        reducer: Brings fragments to the other ranks while training goes on.
        model: DDP around the model, which is to leave gradients and buffers alone; None under FSDP2.
        check_digest: Compare the anchors over the ranks now and then.

    Attributes:
        model: As given; the adapter wraps it anew where what is trained changes before steps are local.
        own: Gives the optimizers and the scaler, whose state differs between ranks, by name; set by the adapter.
    """

    def __init__(
        self,
        sync: GradientSync,
        rule: OuterRule,
        params: Mapping[str, nn.Parameter],
        *,
        buffers: Callable[[], Mapping[str, Tensor]],
        reducer: AsyncReducer | None,
        model: DistributedDataParallel | None = None,
        check_digest: bool = True,
    ) -> None:
        self.sync = sync
        self.rule = rule
        self.own: Callable[[], Mapping[str, Stateful]] = dict
        self._params = dict(params)
        self._buffers = buffers
        self._reducer = reducer
        self.model = model
        self._check_digest = check_digest
        self._num_steps: dict[int, int] = {}  # of each optimizer, in this process
        self._loaded: tuple[Mapping[str, Any], bool] | None = None
        self.outer: OuterSync | None = None
        self._validated = (sync.step_index, 0)  # steps and turns at the last validation
        self._warned = False
        sync.save_per_rank(STATE_KEY, self)
        if rule.synchronous_steps == 0:
            self._start()

    def _start(self) -> None:
        """Steps are local from now on. What is left of gradients is in other units than weights."""
        self.outer = self._make_outer()
        if self.model is not None:
            self.model.require_backward_grad_sync = False
            self.model.require_forward_param_sync = False
            self.model.broadcast_buffers = False

    def _make_outer(self) -> OuterSync:
        outer = OuterSync(
            self.sync, self._params, self.rule, buffers=self._buffers, reducer=self._reducer, states=self._states
        )
        outer.on_left_out = self._forget_moments
        if self._check_digest:
            digest = ParameterDigest(outer.anchors, self.sync.ranks.peers, self.sync.device)
            outer.on_turn = lambda: digest.after_step(self.sync.step_index)
        return outer

    def _states(self) -> dict[str, dict[str, Tensor]]:
        """What this rank's optimizers keep of each parameter, as far as it is a tensor."""
        kept = [state for part in self.own().values() if isinstance(state := getattr(part, "state", None), Mapping)]
        return {
            name: {
                key: local_part(value)
                for state in kept
                for key, value in state.get(param, {}).items()
                if isinstance(value, Tensor) and value.dim()
            }
            for name, param in self._params.items()
        }

    def _forget_moments(self) -> None:
        """This rank's weights were not finite, so its optimizers' moments are not either: they start anew."""
        for part in self.own().values():
            if isinstance(state := getattr(part, "state", None), MutableMapping):
                state.clear()

    def extend(self, params: Mapping[str, nn.Parameter]) -> None:
        """More parameters are trained, and `sync` knows them."""
        self._params |= dict(params)
        if self.outer is not None:
            self.outer.apply()
            state = self.outer.state_dict()
            self.outer = self._make_outer()
            self.outer.load_state_dict(state | {"weights": {}})  # the model has them, and may be about to run backward

    def after_optimizer(self, optimizer: Optimizer | None) -> None:
        """An optimizer has stepped, or a scaler has skipped its step. Several optimizers take their steps together.

        Raises:
            DivergenceError: On every rank, if anchors were compared after this step and differ.
        """
        if optimizer is not None:
            taken = self._num_steps[id(optimizer)] = self._num_steps.get(id(optimizer), 0) + 1
            if taken < max(self._num_steps.values()) or list(self._num_steps.values()).count(taken) > 1:
                return  # another one has begun this step
        if self.outer is None:
            self._leave_synchronous_part()
            return
        self.outer.after_step(None if optimizer is None else float(optimizer.param_groups[0]["lr"]))

    def _leave_synchronous_part(self) -> None:
        if self.sync.step_index >= self.rule.synchronous_steps:
            self._start()

    def _before_validation(self) -> None:
        """Warn, once, if ranks have trained since the last validation but have not had a turn: it has seen the same
        weights.
        """
        if self.outer is None:
            return
        now = (self.sync.step_index, self.outer.num_turns)
        before, self._validated = self._validated, now
        if self._warned or now[0] == before[0] or now[1] > before[1]:
            return
        self._warned = True
        if self.sync.ranks.rank == 0:
            _log.warning(
                "this validation sees the weights of optimizer step %d: the ranks have trained %d steps since, each by"
                " itself, and have had no turn (a round is %d steps). Validate less often than a round, or give outer"
                " a smaller every; early stopping and the choice of the best checkpoint would act on old weights",
                before[0],
                now[0] - before[0],
                self.outer.round_length,
            )

    def close(self) -> bool:
        """Whether nothing of it runs any more."""
        return not isinstance(self._reducer, BucketWorker) or self._reducer.close()

    def finish(self) -> None:
        """Training ends: see `OuterSync.finish`."""
        if self.outer is not None:
            self.outer.finish()

    @contextlib.contextmanager
    def shared_weights(self, *, validates: bool) -> Iterator[None]:
        """The model has the anchors inside."""
        if self.outer is None:
            yield
            return
        if validates:
            self._before_validation()
        with self.outer.shared_weights():
            yield

    # -- saving -----------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """Before the engine's state is read: what travels has arrived."""
        if self.outer is not None:
            self.outer.arrive()

    def state_dict(self) -> dict[str, Any]:
        if self.outer is None:
            return {"outer": None}
        return {"outer": self.outer.state_dict(), "own": {name: each.state_dict() for name, each in self.own().items()}}

    def load_state_dict(self, state: Mapping[str, Any], *, own: bool) -> None:
        """Kept until `resume`: the framework has yet to load the model and the optimizers."""
        self._loaded = (state, own)
        if state["outer"] is not None and self.outer is None:
            self._start()

    def forget(self) -> None:
        self._loaded = None

    def resume(self) -> None:
        """The framework has loaded all it saves, or training begins: go on from this rank's own weights and optimizers,
        if they have been loaded, otherwise from the model's weights, which all ranks share.
        """
        loaded, self._loaded = self._loaded, None
        if self.outer is None:
            return
        self.outer.rebase()
        if loaded is None or loaded[0]["outer"] is None:
            return
        state, own = loaded
        self.outer.load_state_dict(state["outer"], own=own)
        if own:
            parts = self.own()
            for name, saved in state["own"].items():
                if name in parts:
                    parts[name].load_state_dict(_sharded(parts[name], saved))

    def adopt(self, earlier: LocalSteps) -> None:
        """Continue with the state of an earlier attachment of the same model; it has finished."""
        self.load_state_dict(earlier.state_dict() | {"own": {}}, own=False)


def local_steps(
    module: nn.Module,
    sync: GradientSync,
    rule: OuterRule,
    *,
    check_digest: bool,
    ddp: DistributedDataParallel | None = None,
) -> LocalSteps:
    """Local steps of a model that is the same on all ranks of `sync` now."""
    return LocalSteps(
        sync,
        rule,
        trainable_parameters(module),
        buffers=lambda: {canonical_name(name): buffer for name, buffer in module.named_buffers()},
        reducer=reducer_for(rule, sync.device),
        model=ddp,
        check_digest=check_digest,
    )


def reducer_for(rule: OuterRule, device: torch.device) -> AsyncReducer | None:
    """What lets training go on while fragments travel; None where each is applied at once."""
    if rule.delay_of(rule.shortest_turn) == 0:
        return None
    return BucketWorker() if device.type == "cpu" else SideStream(device)


def _sharded(part: Stateful, saved: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state as it was saved, its tensors sharded again where their parameters are."""
    groups = getattr(part, "param_groups", None)
    if groups is None:
        return saved
    params = [param for group in groups for param in group["params"]]
    state = {at: {key: _like(params[at], value) for key, value in kept.items()} for at, kept in saved["state"].items()}
    return saved | {"state": state}


def _like(param: Tensor, value: Any) -> Any:
    if not isinstance(param, DTensor) or not isinstance(value, Tensor) or value.shape != param.to_local().shape:
        return value
    return DTensor.from_local(
        value.to(param.device),
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
