"""The published outer rules, and their names in strategies, configuration files and commands: local SGD and its
relatives, which average weights; and DiLoCo, whose outer optimizer has momentum, with its streaming form.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from lowbit_strategy import leaves
from lowbit_strategy.attach.round_rule import RoundRule
from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.kernels.format import BlockFormat
from lowbit_strategy.local_steps.rule import OuterRule
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.options.configuration import configuration
from lowbit_strategy.options.conversion import call, convert, named


@configuration
class LocalSGD(OuterRule):
    """The mean of all ranks' weights after every round: ``anchor = anchor - mean(anchor - weights)``.

    With ``every=1``, an exact codec and plain SGD inside, this is synchronous training.

    References:
        Stich, "Local SGD Converges Fast and Communicates Little", 2018, arXiv 1805.09767.
    """

    name: ClassVar[str] = "localsgd"


@configuration
class OverlapLocalSGD(LocalSGD):
    """Each rank is pulled toward the previous anchor at the end of a round, then sends its weights.

    1. ``weights = mix * weights + (1 - mix) * anchor``
    2. the ranks' weights travel while the next round is trained
    3. ``v = momentum * v + mean(weights) - anchor``, ``anchor = anchor + v``

    Args:
        momentum: Momentum of the anchor, in [0, 1).
        delay: Must be 0, since bytes travel until the next fragment is sent.
        mix: Fraction of a rank's own weights in step 1, above 0.

    References:
        Wang et al., "Overlap Local-SGD: An Algorithmic Approach to Hide Communication Delays in Distributed SGD",
        2020, arXiv 2002.09539.
    """

    name: ClassVar[str] = "overlaplocalsgd"
    travels_a_turn: ClassVar[bool] = True
    pulls_before_sending: ClassVar[bool] = True

    momentum: float = 0.7
    mix: float = 0.4

    def __post_init__(self) -> None:
        LocalSGD.__post_init__(self)
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum!r}")
        if self.delay:
            raise ValueError(f"delay must be 0, since bytes travel for a whole round anyway, got {self.delay}")
        if not self.mix:
            raise ValueError(f"mix must be in (0, 1), got {self.mix!r}: with 0 ranks would send the anchor")


@configuration
class PostLocalSGD(LocalSGD):
    """Synchronous training for the first steps, through the same compressor; then local SGD.

    All rules have this option; here it is the default.

    Args:
        synchronous: Optimizer steps of the synchronous part, at least 1. More: closer to synchronous training, more
            bytes.

    References:
        Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", 2018, arXiv 1808.07217.
    """

    name: ClassVar[str] = "postlocalsgd"

    synchronous: int = 1000

    def __post_init__(self) -> None:
        LocalSGD.__post_init__(self)
        if not self.synchronous:
            raise ValueError("synchronous must be a positive integer: without it use LocalSGD")


# The largest elements of a Gaussian are close together: two magnitudes, in units of their mean, fit them within 6 %.
_VALUES = BlockFormat(bits=2, block_size=64, scale_rule="mean_abs", codebook=(-1.21875, -0.9453125, 0.9453125, 1.21875))


@configuration
class SparseLoCo(LocalSGD):
    """Sends the largest 64th of every 4,096 elements with 2 bits each; the residual decays by 0.95 per round.

    Every rank's message goes to all ranks, as published, so their mean is exact. The residual replaces outer momentum,
    which would move only the few elements that were sent.

    Args:
        lr: Learning rate of the outer SGD.

    References:
        Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025, arXiv 2508.15706.
    """

    name: ClassVar[str] = "sparseloco"

    lr: float = 1.0

    def __post_init__(self) -> None:
        LocalSGD.__post_init__(self)
        if not self.lr > 0.0:
            raise ValueError(f"lr must be above 0, got {self.lr!r}")

    def compressor(self) -> Compressor:
        chunk_top_k = leaves.load("lowbit_strategy.methods.zoo.chunktopk:ChunkTopK", self.name)
        compressor: Compressor = chunk_top_k(density=1 / 64, values=BlockCodec(_VALUES), gather=True, decay=0.95)
        return compressor


@configuration
class DiLoCo(OuterRule):
    """An outer optimizer, SGD with Nesterov momentum by default, takes the mean pseudo-gradient as its gradient.

    Its streaming form has several `fragments`, a `delay` in which ranks train while bytes travel, and a `mix` of each
    rank's own weights with the anchor.

    Args:
        lr: Learning rate of the outer optimizer. 1 without momentum gives the mean of the weights.
        momentum: Momentum of the outer optimizer, in [0, 1). Larger: faster, less stable.
        nesterov: Whether to use Nesterov's momentum.

    Raises:
        ValueError: A field is out of range.

    References:
        Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, arXiv 2311.08105;
        Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, arXiv 2501.18512.
    """

    name: ClassVar[str] = "diloco"

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        OuterRule.__post_init__(self)
        if not self.lr > 0.0:
            raise ValueError(f"lr must be above 0, got {self.lr!r}")
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum!r}")


@configuration
class EagerDiLoCo(DiLoCo):
    """`DiLoCo` whose bytes travel during the next round. With W ranks and this rank's pseudo-gradient ``d(t)`` of round
    t:

    1. after round t the mean of round t - 1 has arrived: ``D = d(t) / W + mean(t - 1) - d(t - 1) / W``
    2. each rank's outer optimizer steps with D from where its round began; ``d(t)`` is sent
    3. the next round is trained while it travels

    Only the other ranks' part is a round old, which costs less loss than delaying everything. The shared anchor, for
    validation and checkpoints, follows the means that have arrived.

    Args:
        delay, mix: Must be 0.

    References:
        Kale et al., "Eager Updates For Overlapped Communication and Computation in DiLoCo", 2025, arXiv 2502.12996.
    """

    name: ClassVar[str] = "eagerdiloco"
    eager: ClassVar[bool] = True
    travels_a_turn: ClassVar[bool] = True

    def __post_init__(self) -> None:
        DiLoCo.__post_init__(self)
        if self.delay or self.mix:
            raise ValueError(
                f"delay and mix must be 0, got {self.delay} and {self.mix}: bytes travel for a whole turn anyway"
            )

    @property
    def moment_nbytes(self) -> float:
        return 2 * super().moment_nbytes + 4.0  # also the own share's moments, and the offset


@configuration
class StreamingDiLoCo(DiLoCo):
    """`DiLoCo` with fragments, a delay and mixing; pseudo-gradients have 2 bits unless another compressor is given.

    References:
        Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, arXiv 2501.18512 (4 bits in the
        E3M0 format there; 2 fitted bits with error feedback here).
    """

    name: ClassVar[str] = "streamingdiloco"

    fragments: int = 4
    delay: int = 5
    mix: float = 0.5

    def compressor(self) -> Compressor:
        return LoCo(bits=2, codebook="fitted", block_size=64, beta=0.0, reset_steps=None)


OUTER_RULES: dict[str, OuterRule] = {
    rule.name: rule
    for rule in (
        DiLoCo(),
        EagerDiLoCo(),
        LocalSGD(),
        OverlapLocalSGD(),
        PostLocalSGD(),
        SparseLoCo(),
        StreamingDiLoCo(),
    )
}


def as_outer(value: object, field: str = "outer") -> OuterRule:
    """Return an outer rule, given one, its name, or a mapping: ``{name: diloco, every: 30}``.

    Raises:
        ValueError: `value` is none of these, or has an unknown name or option.
    """
    rule = convert(value, RoundRule, field)  # type: ignore[type-abstract]
    assert isinstance(rule, OuterRule)
    return rule


def made_rule(value: Any) -> OuterRule:
    """Make an outer rule from its name or a mapping."""
    base, options = named(value, OUTER_RULES, "outer rule")
    preset = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    return call(type(base), preset | options)
