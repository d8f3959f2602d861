"""State that follows the reductions of parameters."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext

from torch.optim import Optimizer


class Tally:
    """State that follows reductions. The methods here do nothing; subclasses override those that they need."""

    def keep(self, names: Collection[str]) -> None:
        """These parameters are about to be reduced, and the reduction may be rolled back."""

    def commit(self, names: Collection[str]) -> None:
        """The open reductions of these parameters have been used."""

    def roll_back(self, names: Collection[str]) -> None:
        """The open reductions of these parameters are thrown away."""

    def set_aside(self, names: Collection[str]) -> None:
        """The gradients of these parameters were cleared; what becomes of their reductions is decided later."""
        self.roll_back(names)

    def settle(self, names: Collection[str], *, used: bool) -> None:
        """It is now known whether the reductions that were set aside were `used`."""

    def taken_back(self, names: Collection[str]) -> AbstractContextManager[None]:
        """A context, for checkpoints, in which these parameters' state is as before their reductions."""
        return nullcontext()


class Follower(Tally):
    """Is told when optimizers step on reduced gradients. This one does nothing."""

    def stepped(self, optimizer: Optimizer) -> None:
        """`optimizer` has stepped on what was reduced."""

    def name_parameters(self) -> None:
        """The model has other parameters now."""
