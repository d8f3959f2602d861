"""The base class of corrections."""

from __future__ import annotations

from torch.optim import Optimizer

from lowbit_strategy.engine.transaction_listener import Follower


class Correction(Follower):
    """Corrects ``exp_avg_sq`` whenever an optimizer has stepped on reduced gradients."""

    def stepped(self, optimizer: Optimizer) -> None:
        found = getattr(optimizer, "found_inf", None)  # set by a gradient scaler during the step
        if found is None or not bool(found):  # fused optimizers skip a step that overflowed
            self.correct_(optimizer)

    def correct_(self, optimizer: Optimizer) -> None:
        """Correct ``exp_avg_sq`` after this step."""
        raise NotImplementedError
