"""The door for ranks that meet in rounds: what the option that brings them has to offer, and its part in a session."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lowbit_strategy import leaves
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.interfaces import Stateful
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.registry import register_other_names
from lowbit_strategy.options.conversion import Conversion, Source, register_conversion
from lowbit_strategy.plan.rounds import RoundPlan


class Replica(Protocol):
    """A replica among others that come and go.

    Attributes:
        on_healed: Called when this replica has received the others' state: `sync.step_index` is theirs.
    """

    sync: Any
    data: Any
    on_healed: Callable[[], object]

    @property
    def has_joined(self) -> bool:
        """Whether it has met the others."""

    @property
    def leads(self) -> bool:
        """Whether this replica is the first one, which writes checkpoints."""

    def check_joined(self) -> None:
        """Raises:
        RuntimeError: Training has begun, and it has not met them.
        """

    def count_samples(self, number: int) -> None:
        """`number` more before the next optimizer step."""

    def attached(self, session: Any, module: nn.Module) -> None:
        """The session is complete."""


class EveryStep:
    """When ranks meet, as a session asks: in every step. What lets them meet in rounds derives from this.

    Attributes:
        own: Gives the optimizers and the scaler, whose state may differ between ranks, by name; set by the adapter. If
            it gives none, as in a custom loop, those that have stepped count.
        on_forward: Called before each forward pass in training, where this sees it.
        serves_replaced: Whether other parameters in the place of those that it was given are served.
    """

    own: Callable[[], Mapping[str, Stateful]] = dict
    on_forward: Callable[[], None]
    serves_replaced: ClassVar[bool] = True

    @property
    def replica(self) -> Replica | None:
        """This replica, where replicas join and leave; otherwise None."""
        return None

    def wrapped_by(self, model: DistributedDataParallel | None) -> None:
        """DDP around the model, which the adapter may have replaced."""

    def extend(self, params: Mapping[str, nn.Parameter]) -> None:
        """More parameters are trained, and the engine knows them."""

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """It has stepped parameters of the model.

        Raises:
            ValueError: It cannot be served.
        """

    def begin_forward(self) -> None:
        """A forward pass in training begins."""

    def observe_loss(self, loss: Tensor) -> None:
        """Takes note of a batch's loss, before this rank steps."""

    def after_optimizer(self, optimizer: Optimizer | None) -> None:
        """An optimizer has stepped, or a scaler has skipped its step. None: the only one has."""

    def shared_weights(self, *, validates: bool) -> contextlib.AbstractContextManager[None]:
        """A context in which the model has the weights that all ranks share."""
        return contextlib.nullcontext()

    def weights_replaced(self) -> None:
        """Continues from the weights that the model has now; called inside `shared_weights`, on all ranks."""

    def arrive(self) -> None:
        """Waits for what is under way, before the engine's state is read."""

    def resume(self) -> None:
        """The framework has loaded everything, or training begins."""

    def adopt(self, earlier: Any) -> None:
        """Continue with the state of an earlier attachment of the same model."""

    def finish(self) -> None:
        """Training ends."""

    def close(self) -> bool:
        """Returns whether the threads of this have ended."""
        return True

    def adapter(self, framework: str) -> Any:
        """A module with what the adapter of that name calls where ranks meet in rounds; None: there is nothing."""
        return None


class RoundRule(ABC):
    """An option by which ranks meet in rounds, with gradients that stay on their rank in between."""

    @property
    @abstractmethod
    def begins_in_steps(self) -> bool:
        """Whether gradients are reduced in the first steps."""

    @abstractmethod
    def compressor(self) -> Compressor:
        """If the user chooses none."""

    @abstractmethod
    def planned(self, every: int | None = None) -> RoundPlan:
        """A round. `every`: its optimizer steps; None: those of the first one."""

    @abstractmethod
    def check_options(self, options: Any, *, scatter: bool) -> None:
        """Raises:
        ValueError: `options` (`SyncOptions`) do not go with it.
        """

    @abstractmethod
    def check_model(self, compressor: Compressor, specs: Sequence[TensorSpec]) -> None:
        """Raises:
        ValueError: The compressor does not go with it, for these parameters.
        """

    @abstractmethod
    def check_optimizers(self, options: Any, optimizers: Iterable[Optimizer]) -> None:
        """Raises:
        ValueError: An optimizer does not go with it.
        """

    @abstractmethod
    def attach(
        self, module: nn.Module, sync: GradientSync, *, check_digest: bool, ddp: DistributedDataParallel | None
    ) -> EveryStep:
        """Take over when the ranks of `sync` meet.

        Args:
            module: The model, the same on all ranks of `sync`.
            sync: Engine of the model; nothing else uses its group between steps.
            check_digest: Compare over the ranks now and then what they share.
            ddp: Around the model, if it is wrapped.
        """


def _from_value(value: Any, source: Source) -> RoundRule:
    made: RoundRule = leaves.load("lowbit_strategy.local_steps.published:made_rule", "outer")(value, source)
    return made


def _known() -> Iterable[RoundRule]:
    target = "lowbit_strategy.local_steps:OUTER_RULES"
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
