"""The interface of options by which ranks meet in rounds: what such an option provides, and its part in a session."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lowbit_strategy import leaves
from lowbit_strategy.attach.part import Part
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.registry import register_other_names
from lowbit_strategy.options.conversion import Conversion, Source, register_conversion
from lowbit_strategy.plan.rounds import RoundPlan


class EveryStep:
    """Tells a session when ranks meet. Here they meet in every step; what lets them meet in rounds derives from this.

    Attributes:
        serves_replaced: Whether other parameters in the place of those that it was given are served.
    """

    serves_replaced: ClassVar[bool] = True

    @property
    def replica(self) -> Any:
        """This replica, where replicas join and leave; otherwise None."""
        return None

    @property
    def writes_checkpoints(self) -> bool:
        """Whether this process's ranks write checkpoints."""
        return self.replica is None or bool(self.replica.leads)

    def bind(self, optimizers: Callable[[], Sequence[Optimizer]], scaler: Callable[[], Any]) -> None:
        """Note who steps the model. The state of the optimizers and of the scaler, if any, may differ between ranks."""

    def attached(self, session: Any, module: nn.Module) -> None:
        """The session is complete."""

    def wrapped_by(self, model: DistributedDataParallel | None) -> None:
        """Note the DDP wrapper of the model, which the adapter may have replaced."""

    def extend(self, params: Mapping[str, nn.Parameter]) -> None:
        """More parameters are trained now; the engine already knows them."""

    def begin_forward(self) -> None:
        """A forward pass in training begins."""

    def begin_backward(self, loss: Tensor | None) -> None:
        """A backward pass begins, before this rank steps. `loss`: the loss of its batch, if known."""

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
        """Continue with the state of an earlier attachment of the same model."""

    def finish(self) -> None:
        """Training ends."""

    def close(self) -> bool:
        """Return whether all threads of this object have ended."""
        return True


class RoundRule(Part, ABC):
    """An option by which ranks meet in rounds; between meetings, gradients stay on their rank."""

    @property
    @abstractmethod
    def begins_in_steps(self) -> bool:
        """Whether gradients are reduced in the first steps."""

    @abstractmethod
    def compressor(self) -> Compressor:
        """The compressor to use if the user chooses none."""

    @abstractmethod
    def planned(self, every: int | None = None) -> RoundPlan:
        """Plan a round of `every` optimizer steps; None: as many as the first round has."""

    @abstractmethod
    def meet(
        self,
        module: nn.Module,
        sync: GradientSync,
        members: Any,
        *,
        ddp: DistributedDataParallel | None,
    ) -> EveryStep:
        """A model is attached: return the object that decides when ranks meet.

        Args:
            module: The model.
            sync: Its engine, whose process group nothing else uses between steps.
            members: What `RoundMembers.registered` returned; None: the ranks stay the same.
            ddp: DDP around the model, if it is wrapped.
        """

    def adapter(self, framework: str) -> Any:
        """A module with what the adapter of that name calls where ranks meet in rounds; None: there is nothing."""
        return None


class RoundMembers(Part, ABC):
    """An option that lets ranks join and leave: each process, or each node with one model, has its own world."""

    @abstractmethod
    def registered(self, prepared: Any, module: nn.Module, group: dist.ProcessGroup | None) -> Any:
        """A model is about to be attached: make it known to the others, and return what a rule needs to meet them.

        Args:
            prepared: A `PreparedModel`.
            module: The model.
            group: The ranks that this process knows.

        Raises:
            ValueError: The ranks do not share one model where they should.
            ConnectionError: Nobody answers.
        """

    @abstractmethod
    def adapter(self, framework: str) -> Any:
        """What replaces `RoundRule.adapter`."""


def _from_value(value: Any, source: Source) -> RoundRule:
    made: RoundRule = leaves.load("lowbit_strategy.local_steps.published:made_rule", "outer")(value, source)
    return made


def _known() -> Iterable[RoundRule]:
    target = leaves.NAMES["OUTER_RULES"]
    return leaves.load(target, "outer").values() if leaves.is_present(target) else ()


register_other_names(leaves.RULES, "it is an outer rule, outer={0!r} beside a compressor or alone (strategy {0}_ddp)")
register_conversion(
    RoundRule,
    Conversion(
        _from_value,
        "an outer rule such as DiLoCo(every=30), a name such as 'diloco' or {name: diloco, every: 30}",
        "an outer rule such as diloco or {name: diloco, every: 30}",
        known=_known,
    ),
)
