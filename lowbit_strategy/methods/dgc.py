"""Deep gradient compression: momentum is applied before sparsifying, so that delayed elements keep their momentum."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import DenseCodec, StateTensors, StepContext
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.collectives.sparse_layout import Chosen
from lowbit_strategy.kernels.select import TINY, Sum, largest_threshold, top_k
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import Assignment
from lowbit_strategy.methods._base.method import Method
from lowbit_strategy.methods._base.momentum import MomentumCodec
from lowbit_strategy.methods._base.positions import CommonPositions, OwnPositions, check_density
from lowbit_strategy.methods._base.reducer import Reducer, ReducerState
from lowbit_strategy.methods._base.selectors import matching
from lowbit_strategy.methods._base.sparse_residuals import Condition, add_at_once_, conditions, pending_sums
from lowbit_strategy.options.configuration import configuration

_SAMPLE_SHARE = 0.01
_SAMPLE_KEPT = 128  # minimum number of sample elements above the threshold: the count is then accurate to 9 %
_MAX_ROUNDS = 10
_LEAST = 0.8


def select_by_sample(total: Sum, k: int, *, seed: int) -> Chosen:
    """Select 0.8 k to k of the sum's largest elements, in a few passes and without sorting.

    The threshold comes from a sample. While it selects fewer than 0.8 k elements it is lowered by a fifth, at most ten
    times; if it selects more than k, the largest of them are taken. If the sample would be a quarter of the sum, the
    selection is exact.
    """
    numel = total.numel()
    num = max(math.ceil(_SAMPLE_SHARE * numel), math.ceil(_SAMPLE_KEPT * numel / k))
    if 4 * num >= numel:
        return Chosen(*total.top_k(k)).without_zeros()
    sample = total.sample(num, seed=seed)
    threshold = max(largest_threshold(sample, round(k / numel * num)), TINY)  # zeros are never sent
    for _ in range(1 + _MAX_ROUNDS):
        indices, values = total.above(threshold, expected=k)
        if indices.numel() >= _LEAST * k or threshold == TINY:
            break
        threshold = max(threshold * 0.8, TINY)
    return largest_of(indices, values, k)


def largest_of(indices: Tensor, values: Tensor, most: int) -> Chosen:
    """The selected elements, or only the `most` largest of them."""
    if indices.numel() > most:
        chosen, values = top_k(values, most)
        indices = indices.index_select(0, chosen)
    return Chosen(indices.long(), values)


_WHOLE = CommonPositions(density=1.0)


@configuration
class DGC(OwnPositions):
    """Deep gradient compression.

    Every step, for each parameter, on every rank:

    1. ``g = g * min(1, W**-0.5 * clip_norm / |g|)``, with the norm of all gradients of the rank
    2. ``u' = m * u + g``, ``v = v + u'``; Nesterov: ``u' = m * (u + g)``, ``v = v + u' + g``
    3. a threshold from a sample of 1 % keeps 0.8 k to k of the k = density * n largest ``|v|``
    4. these are sent; ``u' = v = 0`` there (factor masking)
    5. the result is the mean over ranks of what was sent, and 0 where no rank sent

    With `warmup_steps` the density starts at 25 % and falls in stages; the preset ``dgc`` has 100 steps per stage. At a
    density of 1 nothing is masked. Exempt parameters are sent whole, with the same momentum and clipping. The optimizer
    applies weight decay, after the mean.

    Args:
        density: Density after the warm-up, in (0, 1].
        values, residual: See `TopK`. Momentum takes another 4 bytes per parameter.
        momentum: Momentum in [0, 1). If it is above 0, use SGD without momentum, so that momentum is applied only once.
            Keep 0 with optimizers like Adam, which average gradients themselves.
        nesterov: Use Nesterov's momentum; needs ``momentum > 0``.
        clip_norm: Approximate bound on the norm of the mean gradient, applied in step 1; None: no clipping. Under DDP
            the parameters then wait for the last bucket; under FSDP2 each module is clipped separately. With a loss
            scaler it is in units of scaled gradients. Prefer it to the framework's own clipping (Lightning's
            ``gradient_clip_val``), which acts on the sparse mean and loses the clipped part, which has already left the
            residual.
        warmup_steps: Optimizer steps per stage of the warm-up, about an epoch; 0: no warm-up.
        warmup_densities: Densities of the stages; those below `density` are skipped.

    References:
        Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training", 2018,
        arXiv 1712.01887, algorithms 1 and 4, section 3. If more than k are selected, the largest are sent; the authors'
        code sends the first.
    """

    name: ClassVar[str] = "dgc"

    density: float = 0.001
    momentum: float = 0.0
    nesterov: bool = False
    clip_norm: float | None = None
    warmup_steps: int = 0
    warmup_densities: tuple[float, ...] = (0.25, 0.0625, 0.015625, 0.004, 0.001)

    def __post_init__(self) -> None:
        OwnPositions.__post_init__(self)
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum!r}")
        if self.nesterov and self.momentum == 0.0:
            raise ValueError("nesterov=True needs momentum above 0")
        if self.clip_norm is not None and not self.clip_norm > 0.0:
            raise ValueError(f"clip_norm must be positive or None, got {self.clip_norm!r}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must be an integer, 0 for none, got {self.warmup_steps!r}")
        for density in self.warmup_densities:
            check_density(density, "warmup_densities")

    def phase(self, step_index: int) -> DGC:
        stages = [density for density in self.warmup_densities if density > self.density]
        if not self.warmup_steps or step_index >= self.warmup_steps * len(stages):
            return replace(self, warmup_steps=0) if self.warmup_steps else self
        return replace(self, density=stages[step_index // self.warmup_steps], warmup_steps=0)

    @property
    def momenta(self) -> frozenset[float]:
        return frozenset({self.momentum})

    def exempted(self, spec: TensorSpec) -> Assignment | None:
        assignment = OwnPositions.exempted(self, spec)
        if assignment is None:
            return None
        if self.clip_norm is not None:
            return assignment._replace(method=self.method(spec))
        if self.momentum == 0.0:
            return assignment
        uplink = MomentumCodec(momentum=self.momentum, nesterov=self.nesterov)
        return assignment._replace(method=CodecPair(uplink, DenseCodec("float32")))

    @property
    def whole_model(self) -> bool:  # type: ignore[override]
        """Whether `reduce` needs all parameters. With clipping, exempt ones count in the norm, and are sent whole."""
        return self.clip_norm is not None

    @property
    def label(self) -> str:
        return f"dgc {self.density:g}, {self.codec.label}"

    @property
    def own_temporary_nbytes(self) -> float:  # type: ignore[override]
        return 43.0 * self.density  # mostly in the warm-up

    @property
    def residual_gain(self) -> float | None:
        return 1.0 if self.momentum == 0.0 and self.clip_norm is None else None

    def continues(self, earlier: Method) -> bool:
        return isinstance(earlier, DGC) and (earlier.momentum, earlier.nesterov, earlier.residual) == (
            self.momentum,
            self.nesterov,
            self.residual,
        )

    def init(self, specs: Sequence[TensorSpec], device: torch.device) -> ReducerState:
        state = OwnPositions.init(self, specs, device)
        if self.momentum:
            for spec in specs:
                state[spec.name]["momentum"] = torch.zeros(spec.numel, dtype=torch.float32, device=device)
        return state

    def rescale_(self, state: ReducerState, factor: float | Tensor) -> None:
        Reducer.rescale_(self, state, factor)
        for tensors in state.values():
            if self.momentum:
                tensors["momentum"].mul_(factor)

    def is_dense(self, spec: TensorSpec) -> bool:
        """Whether a parameter is sent whole. Nothing is masked then, and momentum is as in the optimizer."""
        return self.density == 1.0 or (self.whole_model and matching(self.exempt, spec) is not None)

    def reduce_float32(
        self, views: Sequence[ParamView], state: ReducerState, comm: Comm, step: StepContext
    ) -> Iterator[Pending]:
        views = [view for view in views if view.spec.numel]
        if not views:
            return
        found, totals = self.accumulate_(views, state, comm)
        whole = [i for i, view in enumerate(views) if self.is_dense(view.spec)]
        sparse = [i for i, view in enumerate(views) if not self.is_dense(view.spec)]
        if sparse:
            picked = [views[i] for i in sparse], [found[i] for i in sparse], [totals[i] for i in sparse]
            yield from self.send(*picked, state, comm, step)
        if whole:
            views = [views[i] for i in whole]
            indices = yield from _WHOLE.positions(views, state, comm, step)
            yield from _WHOLE.sum_at(indices, views, [found[i] for i in whole], state, comm)

    def accumulate_(
        self, views: Sequence[ParamView], state: ReducerState, comm: Comm
    ) -> tuple[list[Condition], list[Sum]]:
        """Update momentum and velocity. With momentum, zeros are not idle: it decays and is added to the velocity."""
        if not (self.momentum or self.whole_model or self.density == 1.0):
            return pending_sums(views, state)
        found = conditions([view.x for view in views])
        if self.momentum:
            found = [Condition.LIVE if condition is Condition.IDLE else condition for condition in found]
        factor = self.clip_factor(views, found, comm)
        add_at_once_(views, state, found, partial(self._add_, factor=factor), partial(self._undo_, factor=factor))
        return found, [Sum(state[view.spec.name]["residual"]) for view in views]

    def clip_factor(self, views: Sequence[ParamView], found: Sequence[Condition], comm: Comm) -> float:
        if self.clip_norm is None:
            return 1.0
        live = [view.flat() for view, condition in zip(views, found, strict=True) if condition is Condition.LIVE]
        squares = [float(torch.linalg.vector_norm(x, dtype=torch.float32)) ** 2 for x in live]
        limit = self.clip_norm / math.sqrt(comm.world_size)
        norm = math.sqrt(sum(squares))
        return limit / norm if norm > limit else 1.0

    def _add_(self, tensors: list[StateTensors], gradients: list[Tensor], factor: float) -> None:
        velocities = [each["residual"] for each in tensors]
        if self.momentum:
            momenta = [each["momentum"] for each in tensors]
            if self.nesterov:
                torch._foreach_add_(momenta, gradients, alpha=factor)
            torch._foreach_mul_(momenta, self.momentum)
            if not self.nesterov:
                torch._foreach_add_(momenta, gradients, alpha=factor)
            torch._foreach_add_(velocities, momenta)
        if self.nesterov or not self.momentum:
            torch._foreach_add_(velocities, gradients, alpha=factor)

    def _undo_(self, tensors: StateTensors, gradient: Tensor, factor: float) -> None:
        """Undo an overflow, up to rounding; values that are not finite are dropped."""
        velocity = tensors["residual"]
        if self.momentum == 0.0 or self.nesterov:
            velocity.sub_(gradient, alpha=factor)
        if self.momentum:
            momentum = tensors["momentum"]
            velocity.sub_(momentum)
            if self.nesterov:
                momentum.div_(self.momentum).sub_(gradient, alpha=factor)
            else:
                momentum.sub_(gradient, alpha=factor).div_(self.momentum)
            momentum.nan_to_num_(0.0, 0.0, 0.0)
        velocity.nan_to_num_(0.0, 0.0, 0.0)

    def choose(self, view: ParamView, total: Sum, tensors: StateTensors, step: StepContext) -> Chosen:
        return select_by_sample(total, self.num_kept(view.spec), seed=step.seed)

    def taken_out_(self, tensors: StateTensors, chosen: Chosen) -> None:
        if self.momentum:  # factor masking: stale momentum of what was sent
            tensors["momentum"].index_fill_(0, chosen.indices, 0.0)

    def num_messages(self, specs: Sequence[TensorSpec], world_size: int) -> int:
        whole = [spec for spec in specs if self.is_dense(spec)]
        num_whole = _WHOLE.num_messages(whole, world_size) if whole else 0
        sparse = OwnPositions.num_messages(self, specs, world_size)
        return num_whole + (sparse if len(whole) < len(specs) else 0)

    def wire_nbytes(self, spec: TensorSpec, world_size: int) -> int:
        if self.is_dense(spec):
            return _WHOLE.wire_nbytes(spec, world_size)
        return OwnPositions.wire_nbytes(self, spec, world_size)
