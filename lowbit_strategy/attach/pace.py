"""Tells a session when ranks meet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


class Pace:
    """Tells a session when ranks meet: in every step, in rounds, or not at all while steps are the framework's own.

    Attributes:
        serves_replaced: Whether it supports a replacement of the parameters that it was given.
    """

    serves_replaced: ClassVar[bool] = True

    @property
    def replica(self) -> Any:
        """This replica, if replicas join and leave; otherwise None."""
        return None

    @property
    def writes_checkpoints(self) -> bool:
        """Whether this process's ranks write checkpoints."""
        return self.replica is None or bool(self.replica.leads)

    def bind(self, optimizers: Callable[[], Sequence[Optimizer]], scaler: Callable[[], Any]) -> None:
        """Note the optimizers and the scaler, if any; their state may differ between ranks."""

    def attached(self, session: Any, model: nn.Module) -> None:
        """The session around `model`, which may be wrapped in DDP, is complete."""

    def wrapped_by(self, model: DistributedDataParallel) -> None:
        """The adapter has wrapped the model again."""

    def extend(self, params: Mapping[str, nn.Parameter]) -> None:
        """More parameters are trained now; the engine already knows them."""

    def begin_forward(self) -> None:
        """A forward pass in training begins."""

    def begin_backward(self, loss: Tensor | None) -> None:
        """A backward pass begins, before this rank steps. `loss`: the loss of its batch, if known."""

    @property
    def is_baseline(self) -> bool:
        """Whether steps are the framework's own, which bypass the engine."""
        return False

    def end_step(self) -> None:
        """Called when a counted optimizer step has ended on all ranks."""

    def after_load(self) -> None:
        """A checkpoint's residuals have been loaded, on all ranks."""

    def after_optimizer(self, optimizer: Optimizer | None) -> None:
        """An optimizer has stepped, or a scaler has skipped its step. None: there is only one optimizer."""

    def shared_weights(self, *, validates: bool) -> contextlib.AbstractContextManager[None]:
        """A context in which the model has the weights that all ranks share."""
        return contextlib.nullcontext()

    def arrive(self) -> None:
        """Wait for exchanges that are under way, before the engine's state is read."""

    def resume(self) -> None:
        """The framework has loaded everything, or training begins."""

    def adopt(self, earlier: Any) -> None:
        """Continue with the state of an earlier session of the same model."""

    def finish(self) -> None:
        """Training ends."""

    def close(self) -> bool:
        """Return whether all threads of this object have ended."""
        return True


class EveryStep(Pace):
    """Ranks meet in every step."""
