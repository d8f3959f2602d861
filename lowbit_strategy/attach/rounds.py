"""The door for ranks that meet in rounds: what the option that brings them has to offer, and its part in a session."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lowbit_strategy import leaves
from lowbit_strategy.attach.part import Part
from lowbit_strategy.engine.interfaces import Stateful
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.registry import register_other_names
from lowbit_strategy.options.conversion import Conversion, Mismatch, Source, call, register_conversion
from lowbit_strategy.plan.rounds import RoundPlan


class EveryStep:
    """When ranks meet, as a session asks: in every step. What lets them meet in rounds derives from this.

    Attributes:
        own: Gives the optimizers and the scaler, whose state may differ between ranks, by name; set by the adapter. If
            it gives none, as in a custom loop, those that have stepped count.
        serves_replaced: Whether other parameters in the place of those that it was given are served.
    """

    own: Callable[[], Mapping[str, Stateful]] = dict
    serves_replaced: ClassVar[bool] = True

    @property
    def replica(self) -> Any:
        """This replica, where replicas join and leave; otherwise None."""
        return None

    @property
    def writes_checkpoints(self) -> bool:
        """Whether this process's ranks write checkpoints."""
        return True

    def attached(self, session: Any, module: nn.Module) -> None:
        """The session is complete."""

    def wrapped_by(self, model: DistributedDataParallel | None) -> None:
        """DDP around the model, which the adapter may have replaced."""

    def extend(self, params: Mapping[str, nn.Parameter]) -> None:
        """More parameters are trained, and the engine knows them."""

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """It has stepped parameters of the model.

        Raises:
            ValueError: It cannot be served.
        """

    def count_samples(self, number: int) -> None:
        """`number` more before the next optimizer step."""

    def begin_forward(self) -> None:
        """A forward pass in training begins."""

    def begin_backward(self, loss: Tensor | None) -> None:
        """A backward pass begins, before this rank steps. `loss`: of its batch, where it is known."""

    def after_optimizer(self, optimizer: Optimizer | None) -> None:
        """An optimizer has stepped, or a scaler has skipped its step. None: the only one has."""

    def shared_weights(self, *, validates: bool) -> contextlib.AbstractContextManager[None]:
        """A context in which the model has the weights that all ranks share."""
        return contextlib.nullcontext()

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


class RoundRule(Part, ABC):
    """An option by which ranks meet in rounds, with gradients that stay on their rank in between.

    Attributes:
        comes_and_goes: Ranks join and leave: each process, or node that shares one model, has its own world.
    """

    comes_and_goes: ClassVar[bool] = False

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
    def registered(self, prepared: Any, module: nn.Module, group: dist.ProcessGroup | None) -> Callable[..., EveryStep]:
        """A model is about to be attached.

        Args:
            prepared: A `PreparedModel`.
            module: The model.
            group: The ranks that this process knows.

        Returns:
            What takes over when ranks meet, called with the model and its engine, whose group nothing else uses between
            steps; ``check_digest``: compare over the ranks now and then what they share; ``ddp``: around the model, if
            it is wrapped.

        Raises:
            ValueError: The ranks do not share one model where they should.
            ConnectionError: Nobody answers.
        """

    def adapter(self, framework: str) -> Any:
        """A module with what the adapter of that name calls where ranks meet in rounds; None: there is nothing."""
        return None


class RoundMembers(ABC):
    """An option that says which ranks meet in the rounds of a rule."""

    @abstractmethod
    def around(self, rule: RoundRule | None) -> RoundRule:
        """`rule` for these ranks.

        Raises:
            ValueError: It does not go with them, or there is none.
        """


def _from_mapping(value: Any, source: Source) -> RoundMembers:
    if not isinstance(value, Mapping):
        raise Mismatch
    made: RoundMembers = call(leaves.load("lowbit_strategy.elastic:Elastic", "elastic"), value, source)
    return made


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
register_conversion(RoundMembers, Conversion(_from_mapping, "an instance of Elastic", "a mapping", (dict[str, Any],)))
