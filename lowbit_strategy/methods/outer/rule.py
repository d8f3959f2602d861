"""What an outer rule is: how long ranks train by themselves, and which optimizer moves the anchor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor
from torch.optim import Optimizer

from lowbit_strategy.methods._base.compressor import Assignment, Compressor
from lowbit_strategy.methods._base.option_checks import check_positive
from lowbit_strategy.methods.outer.interval import Interval
from lowbit_strategy.options.configuration import configuration


@configuration
class OuterRule(ABC):
    """Local steps between synchronisations.

    The model is cut into `fragments`, whose turns are spread over a round of `every` optimizer steps. Until a
    fragment's turn its weights are trained by each rank alone. In its turn, on every rank:

    1. ``d = anchor - weights``, the pseudo-gradient, in float32
    2. the mean of ``d`` over the ranks, reduced as a gradient is: same compressor, residual and exchange
    3. the outer optimizer steps the anchor with it; all ranks compute the same
    4. ``weights = mix * weights + (1 - mix) * anchor``

    Steps 3 and 4 come `delay` optimizer steps after step 2 has begun; ranks train on while the bytes travel.

    Args:
        every: Optimizer steps of a round, or how they are found (`Quadratic`, `Stepwise`). Larger: fewer bytes, ranks
            drift further apart.
        fragments: Parts of the model that take turns. More: shorter messages, spread evenly over the round.
        delay: Optimizer steps between sending a fragment and applying what has come back, at most a turn's length.
            Larger: slower links are hidden, the anchor is older.
        mix: Share of a rank's own weights that is kept when the anchor comes, in [0, 1).

    Raises:
        ValueError: A field is out of range.
    """

    name: ClassVar[str]

    every: int | Interval = 30
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0

    def __post_init__(self) -> None:
        check_positive("fragments", self.fragments)
        shortest = self._shortest
        check_positive("every", shortest)
        if shortest < self.fragments:
            raise ValueError(
                f"every must be at least fragments, {self.fragments}, got {shortest}: each fragment has a turn per"
                " round, after an optimizer step of its own"
            )
        longest_delay = self.shortest_turn
        if not 0 <= self.delay <= longest_delay:
            raise ValueError(
                f"delay must be 0 to {longest_delay} (every // fragments), got {self.delay}: a fragment has to be back"
                " before the next one is sent"
            )
        if not 0.0 <= self.mix < 1.0:
            raise ValueError(f"mix must be in [0, 1), got {self.mix!r}: with 1 the anchor would never reach a rank")

    @property
    def _shortest(self) -> int:
        return self.every if isinstance(self.every, int) else self.every.shortest

    @property
    def shortest_turn(self) -> int:
        """Optimizer steps between two fragments, at least."""
        return self._shortest // self.fragments

    @property
    def label(self) -> str:
        """A few words for reports."""
        every = f"every {self.every} steps" if isinstance(self.every, int) else f"every {self.every}"
        parts = [self.name, every]
        if self.fragments > 1:
            parts.append(f"{self.fragments} fragments")
        if self.delay:
            parts.append(f"{self.delay} steps later")
        return ", ".join(parts)

    def check(self, assignments: Mapping[str, Assignment]) -> None:
        """Raises:
        ValueError: The compressor does not go with this rule.
        """
        for assignment in assignments.values():
            if self.fragments > 1 and assignment.method.whole_model:
                raise ValueError(
                    f"{assignment.method.label} looks at the whole model at once, and fragments={self.fragments} sends"
                    " it in parts: use fragments=1 or another compressor"
                )

    @abstractmethod
    def optimizer(self, anchors: Sequence[Tensor]) -> Optimizer:
        """The outer optimizer of these tensors, whose gradients will be mean pseudo-gradients."""

    @property
    def synchronous_steps(self) -> int:
        """So many optimizer steps at the start gradients are synchronised, and nothing of this rule happens."""
        return 0

    def delay_of(self, turn_length: int) -> int:
        """Optimizer steps between sending a fragment and applying what has come back.

        Args:
            turn_length: Optimizer steps until the next fragment is sent.
        """
        return self.delay

    def compressor(self) -> Compressor | None:
        """What the publication compresses pseudo-gradients with; None: any compressor serves."""
        return None

    def round_length(self, step: int, learning_rate: float | None, *, rising: bool = False) -> int:
        """Optimizer steps of the round that begins.

        Args:
            step: Optimizer steps completed.
            learning_rate: Of the inner optimizer's first parameter group; None if it is not known.
            rising: Whether the step before had a lower one.
        """
        return self.every if isinstance(self.every, int) else self.every.at(step, learning_rate, rising=rising)
