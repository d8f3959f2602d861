"""State that follows the reductions of parameters."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext

from torch.optim import Optimizer


class TransactionListener:
    """State that follows reductions. These methods do nothing; subclasses override those that they need."""

    def keep(self, names: Collection[str]) -> None:
        """These parameters are about to be reduced, and the reduction may be rolled back."""

    def commit(self, names: Collection[str]) -> None:
        """The open reductions of these parameters have been used."""

    def roll_back(self, names: Collection[str]) -> None:
        """The open reductions of these parameters are discarded."""

    def set_aside(self, names: Collection[str]) -> None:
        """The gradients of these parameters were cleared; whether their reductions count is decided later."""
        self.roll_back(names)

    def settle(self, names: Collection[str], *, used: bool) -> None:
        """It is now known whether the reductions that were set aside were `used`."""

    def taken_back(self, names: Collection[str]) -> AbstractContextManager[None]:
        """A context, for checkpoints, in which these parameters' state is as before their reductions."""
        return nullcontext()


class Follower(TransactionListener):
    """Called when optimizers step on reduced gradients. This base class does nothing."""

    def stepped(self, optimizer: Optimizer) -> None:
        """`optimizer` has stepped on reduced gradients."""

    def name_parameters(self) -> None:
        """The model's parameters have changed."""
