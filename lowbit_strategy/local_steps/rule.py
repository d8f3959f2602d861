"""Outer rules decide how long ranks train separately, and which optimizer moves the anchor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lowbit_strategy import leaves
from lowbit_strategy.attach.pace import Pace
from lowbit_strategy.attach.round_rule import RoundRule
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.local_steps.interval import Interval
from lowbit_strategy.methods._base.chooser import Chooser
from lowbit_strategy.methods._base.compressor import Assignment, Compressor, assign_all
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.options.checks import check_positive
from lowbit_strategy.options.configuration import configuration
from lowbit_strategy.ranks.ranks import Ranks

if TYPE_CHECKING:
    from lowbit_strategy.local_steps.local_round_plan import LocalRoundPlan

# There are few rounds: no reset, and full error feedback. Embeddings and heads at 8 bits gave no lower losses.
_FOUR_BITS = LoCo(beta=0.0, reset_steps=None, high_precision_bits=4)


@configuration
class OuterRule(RoundRule):
    """Local steps between synchronizations.

    The model is cut into `fragments`, whose turns are spread over a round of `every` optimizer steps. Between turns
    each rank trains a fragment separately. In a turn, on every rank:

    1. ``d = anchor - weights``, the pseudo-gradient, in float32
    2. the mean of ``d`` over the ranks is reduced like a gradient: same compressor, residual and exchange
    3. the outer optimizer steps the anchor with it, the same on all ranks
    4. ``weights = mix * weights + (1 - mix) * anchor``

    Steps 3 and 4 happen `delay` optimizer steps after step 2 began; ranks train while the bytes travel.

    Args:
        every: Optimizer steps of a round, or a rule for them (`Quadratic`, `AdaComm`, `Stepwise`); with ``elastic``
            also seconds, as in ``"30s"``. Larger: fewer bytes, but ranks drift further apart.
        fragments: Parts of the model that take turns. More: shorter messages, spread evenly over the round.
        delay: Optimizer steps between sending a fragment and applying the result, at most a turn's length. Larger:
            hides slower links, but the anchor is older.
        mix: Fraction of a rank's own weights that is kept when the anchor arrives, in [0, 1).
        synchronous: Optimizer steps at the start in which gradients are synchronized, through the same compressor.
            Early in training weights move fastest, and separate ranks drift furthest apart. The compressor's residual,
            which is in units of gradients, is dropped afterwards.
        synchronous_compressor: Compressor of gradients in the synchronous part; None: the compressor of
            pseudo-gradients.

    References:
        `synchronous`: Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", 2018, arXiv 1808.07217.
    """

    name: ClassVar[str]
    eager: ClassVar[bool] = False  # whether a rank immediately applies its own share
    travels_a_turn: ClassVar[bool] = False  # whether a fragment is applied when the next one is sent, without `delay`
    pulls_before_sending: ClassVar[bool] = False  # whether weights are mixed with the anchor then, not on arrival

    lr = 1.0  # the outer SGD's; these become options in subclasses
    momentum = 0.0
    nesterov = False

    every: int | Interval = 30
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    synchronous: int = 0
    synchronous_compressor: Compressor | None = None

    def __post_init__(self) -> None:
        self._check_synchronous()
        check_positive("fragments", self.fragments)
        shortest = self._shortest
        check_positive("every", shortest)
        if shortest < self.fragments:
            raise ValueError(
                f"every must be at least fragments, {self.fragments}, got {shortest}: each fragment has a turn per"
                " round, after its own optimizer step"
            )
        if not 0 <= self.delay <= self.shortest_turn:
            raise ValueError(
                f"delay must be 0 to {self.shortest_turn} (every // fragments), got {self.delay}: a fragment must"
                " arrive before the next one is sent"
            )
        if not 0.0 <= self.mix < 1.0:
            raise ValueError(f"mix must be in [0, 1), got {self.mix!r}: with 1 the anchor would never reach a rank")

    def _check_synchronous(self) -> None:
        if self.synchronous < 0:
            raise ValueError(f"synchronous must be a number of steps, got {self.synchronous!r}")
        chosen = self.synchronous_compressor
        if chosen is not None and chosen.momenta != {0.0}:
            raise ValueError(
                f"synchronous_compressor must not apply its own momentum, got {chosen.name}: the optimizer's"
                " momentum is also used for local steps"
            )

    @property
    def _shortest(self) -> int:
        return self.every if isinstance(self.every, int) else self.every.shortest

    @property
    def shortest_turn(self) -> int:
        """Minimum number of optimizer steps between two fragments."""
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

    def planned(self, every: int | None = None) -> LocalRoundPlan:
        """Plan a round of `every` optimizer steps; None: as many as the first round has."""
        make: type[LocalRoundPlan] = leaves.load(
            "lowbit_strategy.local_steps.local_round_plan:LocalRoundPlan", "a plan"
        )
        return make(
            label=self.label,
            every=every or self.round_length(0, None),
            fragments=self.fragments,
            steps_under_way=self.fragments * self.delay_of(self.shortest_turn),
            moment_nbytes=self.moment_nbytes,
            eager=self.eager,
        )

    def attach(self, sync: GradientSync, module: nn.Module, prepared: Any, **options: Any) -> Pace:
        """`options`: see `LocalSteps`."""
        make = leaves.load("lowbit_strategy.local_steps.local_pace:LocalSteps", "outer")  # this module knows rules
        made: Pace = make(module, sync, self, **options)
        return made

    def check_options(self, options: Any) -> None:
        if options.two_level:
            raise ValueError("two_level=True is incompatible with outer: under DDP ranks take separate local steps")
        if options.follows_rate:
            raise ValueError("follows_rate=True is incompatible with outer, whose residuals are of weights: omit it")
        if isinstance(self.every, Interval):
            self.every.check_options(options)

    def check_wrapper(self, options: Any, *, scatter: bool) -> None:
        if scatter and options.shard_size is None:
            raise ValueError(
                "outer needs replicas that train separately, but FSDP2 shards one model over all ranks: give"
                ' shard_size="node" as well, for local steps between nodes, and fully_shard, if you call it yourself, a'
                " mesh of (replicas, shard_size) ranks"
            )

    def on_meshes(self, prepared: Any, module: nn.Module, meshes: Sequence[Ranks]) -> Any:
        if len(meshes) == 1:
            return prepared
        self.check(assign_all(prepared.compressor, prepared.specs), num_meshes=len(meshes))
        peers, *others = (dist.get_process_group_ranks(ranks.peers.group) for ranks in meshes)
        for each in others:
            if each != peers:
                raise ValueError(
                    f"outer= needs replicas that train separately, but the ranks {peers} have the same part of the"
                    f" model, and {each} the same part of parameters on a different mesh, such as experts: let experts"
                    " be sharded over ranks of one replica"
                )
        return prepared

    def check_model(self, compressor: Compressor, specs: Sequence[TensorSpec]) -> None:
        if isinstance(compressor, Chooser):
            raise ValueError(
                "Auto chooses the compressor of every step, but outer= sends only in some steps: give a compressor"
            )
        self.check(assign_all(compressor, specs))
        if self.synchronous_compressor is not None:
            self.synchronous_compressor.check(specs)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        _check_keeps_weights(optimizer)

    def adapter(self, framework: str) -> Any:
        name = f"lowbit_strategy.local_steps.{framework}"
        return None if find_spec(name) is None else import_module(name)

    def check(self, assignments: Mapping[str, Assignment], num_meshes: int = 1) -> None:
        """Raise a ValueError if the compressor does not support this rule or parameters on several meshes."""
        for assignment in assignments.values():
            if self.fragments * num_meshes > 1 and assignment.method.whole_model:
                parts = "experts on another mesh are sent" if num_meshes > 1 else f"fragments={self.fragments} sends it"
                instead = "use" if num_meshes > 1 else "use fragments=1 or"
                raise ValueError(
                    f"{assignment.method.label} looks at the whole model at once, and {parts} in parts: {instead}"
                    " another compressor"
                )

    def optimizer(self, anchors: Sequence[Tensor]) -> Optimizer:
        """Make the outer optimizer of these tensors, whose gradients will be mean pseudo-gradients."""
        return SGD(anchors, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov and self.momentum > 0.0)

    @property
    def moment_nbytes(self) -> float:
        """Bytes of the outer optimizer's state per element."""
        return 4.0 if self.momentum else 0.0

    def is_local(self, step: int) -> bool:
        """Whether the next step after `step` optimizer steps is local."""
        return step >= self.synchronous

    def delay_of(self, turn_length: int) -> int:
        """Optimizer steps between sending a fragment and applying the result.

        Args:
            turn_length: Optimizer steps until the next fragment is sent.
        """
        return turn_length if self.travels_a_turn else self.delay

    def compressor(self) -> Compressor:
        """The compressor of pseudo-gradients if the user chooses none: the paper's, if it has one."""
        return _FOUR_BITS

    def round_length(
        self, step: int, learning_rate: float | None, *, rising: bool = False, progress: float | None = None
    ) -> int:
        """Optimizer steps of the round that begins; for the arguments see `Interval.at`."""
        if isinstance(self.every, int):
            return self.every
        return self.every.at(step, learning_rate, rising=rising, progress=progress)


def _check_keeps_weights(optimizer: Any) -> None:
    """Check that the optimizer does not exchange weights: with local steps, ranks validate, save and end with the
    anchors.

    Raises:
        ValueError: The optimizer, or one inside it, would put this rank's own weights into the model then.
    """
    inner: Any = optimizer
    while inner is not None:
        is_wrapper = type(inner).__module__.startswith("accelerate.")  # it has these methods for any optimizer
        if not is_wrapper and callable(getattr(inner, "train", None)) and callable(getattr(inner, "eval", None)):
            raise ValueError(
                f"{type(inner).__name__} exchanges the model's weights in its train() and eval(), for this rank's own"
                " average, but local steps (outer=) put in the weights that all ranks share: the two are incompatible."
                " Leave outer out, or use an optimizer that keeps one set of weights, such as AdamW (instead of"
                " optim='schedule_free_adamw')"
            )
        inner = getattr(inner, "optimizer", None)
