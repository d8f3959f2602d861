"""SIDCo: thresholds from a distribution fitted to the gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import StateTensors, StepContext
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.collectives.sparse_layout import Chosen
from lowbit_strategy.kernels.select import TINY, Sum, largest_threshold, top_k
from lowbit_strategy.methods._base.positions import OwnPositions
from lowbit_strategy.methods._base.reducer import ReducerState
from lowbit_strategy.methods.dgc import largest_of
from lowbit_strategy.options.configuration import configuration

Distribution = Literal["exponential", "pareto"]
FIRST_SHARE = 0.25  # share of the sample that the first of several stages keeps
_FEWEST = 2  # fewest elements to which a stage can be fitted


def default_stages(density: float) -> int:
    """The number of stages that each keep about a quarter."""
    return max(1, round(math.log(density) / math.log(FIRST_SHARE)))


def most_stages(density: float) -> int:
    """The number of stages that each keep at least a half."""
    return max(1, math.ceil(-math.log2(density)))


def exponential_quantile(mean: float, share: float) -> float:
    """The value that a share of an exponential distribution exceeds."""
    return -mean * math.log(share)


def pareto_quantile(mean: float, variance: float, share: float) -> float:
    """The same for a generalized Pareto distribution fitted by moments."""
    if variance <= 0.0:
        return mean
    ratio = mean * mean / variance
    kappa, alpha = 0.5 * (ratio - 1.0), 0.5 * mean * (ratio + 1.0)
    if abs(kappa) < 1e-6:
        return -alpha * math.log(share)
    return alpha * (1.0 - share**kappa) / kappa


def fitted_threshold(magnitudes: Tensor, density: float, num_stages: int, distribution: Distribution) -> float:
    """A threshold that about a share `density` of the magnitudes reaches.

    1. the distribution is fitted to all magnitudes; its quantile is the first threshold: of the share `density` if
       there is one stage, else of a quarter
    2. each further stage fits an exponential or a generalized Pareto distribution to what exceeds the last threshold,
       and keeps ``(density / 0.25) ** (1 / (num_stages - 1))`` of it

    Args:
        magnitudes: float [n], not empty, all positive and finite.
        density: Density in (0, 1).
        num_stages: More: closer to the density for any true distribution.
        distribution: Distribution of the first stage.
    """
    values = magnitudes.double()
    several = num_stages > 1 and density < FIRST_SHARE
    threshold = _first(values, FIRST_SHARE if several else density, distribution)
    if not several:
        return threshold
    share = (density / FIRST_SHARE) ** (1.0 / (num_stages - 1))
    for _ in range(num_stages - 1):
        values = values[values >= threshold]
        if values.numel() < _FEWEST:
            break
        least = float(values.min())
        mean = float(values.mean()) - least
        if distribution == "exponential":
            threshold = least + exponential_quantile(mean, share)
        else:
            threshold = least + pareto_quantile(mean, float(values.var()), share)
    return threshold


def _first(values: Tensor, share: float, distribution: Distribution) -> float:
    mean = float(values.mean())
    if distribution == "exponential":
        return exponential_quantile(mean, share)
    return pareto_quantile(mean, float(values.var(correction=0)), share)


_SAMPLE_NUMEL = 1 << 14
_SAMPLE_KEPT = 128  # elements of the sample above the threshold: enough for the last stage's moments
_WINDOW = 5
_LARGE = 1e9  # instead of infinity: state must be finite
_TOLERANCE = 1.2
_MOST = 1.3  # at most this many times the wanted count
_REACH = 2.0  # the fit may be off by this factor; beyond it the sample's quantile is used


@configuration
class SIDCo(OwnPositions):
    """Sparsification by a fitted distribution: no sorting, one pass over the gradient.

    Every step, for each parameter, on every rank:

    1. ``h = g + e``
    2. a distribution of ``|h|`` is fitted to a sample, in stages: the first keeps a quarter, each further one is
       fitted to what the last one kept, and the last one keeps the density
    3. the threshold is that of the last stage, but between the sample's quantiles of twice and half the density
    4. ``|h|`` at or above it is sent, but at most the largest 1.3 times the target; ``e' = h``, 0 there
    5. every five steps: one stage less if the fit's average count was too high by a fifth, one more if it was too low,
       between 1 and ``log2(1 / density)``
    6. the mean over ranks of what was sent, 0 where no rank sent

    Zeros are left out of the fit. The authors fit to all of h instead of a sample, start with one stage, and have no
    bounds, so that gradients of plus and minus one send everything. Their step 5 assumes tails lighter than the fitted
    distribution; with heavier ones more stages lower the count, so here a change that made it worse reverses the sense.
    If a sample would be a large part of the parameter, the selection is exact.

    Args:
        density: Target share of each parameter's elements, in (0, 1].
        distribution: ``pareto``: counts closest to the target in tests with any true distribution; ``exponential``: a
            faster fit, off by up to a fifth.

    References:
        Abdelmoniem et al., "An Efficient Statistical-based Gradient Compression Technique for Distributed Training
        Systems", 2021, arXiv 2101.10761, section 2 and algorithm 1.
    """

    name: ClassVar[str] = "sidco"

    distribution: Distribution = "pareto"

    @property
    def label(self) -> str:
        return f"sidco {self.density:g} {self.distribution}, {self.codec.label}"

    def init(self, specs: Sequence[TensorSpec], device: torch.device) -> ReducerState:
        """``stages``; ``steps`` since they were last adapted; ``ratio``: sum over those steps of the fit's count over
        the wanted one; ``last_error``: logarithm of the average when stages last changed; ``sense``: 1 if fewer stages
        lower the count, -1 if more do.
        """
        state = OwnPositions.init(self, specs, device)
        for tensors in state.values():
            tensors["stages"] = torch.full((1,), default_stages(self.density), dtype=torch.int32)
            tensors["steps"] = torch.zeros(1, dtype=torch.int32)
            tensors["ratio"] = torch.zeros(1, dtype=torch.float32)
            tensors["last_error"] = torch.full((1,), _LARGE, dtype=torch.float32)
            tensors["sense"] = torch.ones(1, dtype=torch.float32)
        return state

    def choose(self, view: ParamView, total: Sum, tensors: StateTensors, step: StepContext) -> Chosen:
        wanted = self.num_kept(view.spec)
        few = math.ceil(_SAMPLE_KEPT / self.density)
        num = max(_SAMPLE_NUMEL, few)
        if max(4 * num, 8 * few) >= total.numel():  # fitting would take longer than an exact selection
            return Chosen(*total.top_k(wanted)).without_zeros()
        sample = total.sample(num, seed=step.seed)
        if not math.isfinite(float(sample.max())):
            total.formed()  # raises the error
        indices, values = total.above(self._threshold(sample, tensors), expected=wanted)
        return largest_of(indices, values, math.floor(_MOST * wanted))

    def _threshold(self, sample: Tensor, tensors: StateTensors) -> float:
        """Threshold of the fit, but between the sample's quantiles of twice and half the density."""
        # Zeros of rows without a gradient would distort the fit.
        nonzero_n = sample if float(sample.min()) > 0 else sample[sample > 0]
        n = nonzero_n.numel()
        share = self.density * sample.numel() / max(n, 1)
        if n == 0 or share >= 1.0:
            return TINY  # zeros are never sent
        fitted = fitted_threshold(nonzero_n, share, int(tensors["stages"]), self.distribution)
        tail = top_k(nonzero_n, min(n, max(1, round(_REACH * share * n))))[1]
        least, most = float(tail.min()), largest_threshold(tail, round(share * n / _REACH))
        reached = int((nonzero_n >= fitted).sum())
        self._adapt_stages_(tensors, reached / (share * n))
        return max(TINY, min(max(fitted, least), most))

    def _adapt_stages_(self, tensors: StateTensors, ratio: float) -> None:
        """One stage more or fewer if the fit's counts of the last steps were off on average.

        With light tails more stages raise the count, with heavy tails they lower it: a change that made it worse, or
        was impossible, reverses the sense.
        """
        tensors["ratio"] += ratio
        tensors["steps"] += 1
        if int(tensors["steps"]) < _WINDOW:
            return
        error = math.log(max(float(tensors["ratio"]) / _WINDOW, 1e-9))
        if abs(error) > math.log(_TOLERANCE):
            if abs(error) > float(tensors["last_error"]):
                tensors["sense"].neg_()
            before = int(tensors["stages"])
            wanted = before - int(tensors["sense"]) * (1 if error > 0 else -1)
            tensors["stages"].fill_(max(1, min(most_stages(self.density), wanted)))
            tensors["last_error"].fill_(abs(error) if int(tensors["stages"]) != before else 0.0)
        else:
            tensors["last_error"].fill_(_LARGE)
        tensors["ratio"].zero_()
        tensors["steps"].zero_()
