"""Thresholds from fitted distributions: how large the largest share of a sample is, from its moments alone."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Distribution = Literal["exponential", "gamma", "pareto"]
FIRST_SHARE = 0.25  # of the sample that the first of several stages keeps
_FEWEST = 2  # survivors that another stage can be fitted to


def default_stages(density: float) -> int:
    """Stages that each keep about a quarter."""
    return max(1, round(math.log(density) / math.log(FIRST_SHARE)))


def most_stages(density: float) -> int:
    """Stages that each keep at least a half."""
    return max(1, math.ceil(-math.log2(density)))


def exponential_quantile(mean: float, share: float) -> float:
    """What a share of an exponential distribution exceeds."""
    return -mean * math.log(share)


def pareto_quantile(mean: float, variance: float, share: float) -> float:
    """The same for a generalised Pareto distribution fitted by moments."""
    if variance <= 0.0:
        return mean
    ratio = mean * mean / variance
    kappa, alpha = 0.5 * (ratio - 1.0), 0.5 * mean * (ratio + 1.0)
    if abs(kappa) < 1e-6:
        return -alpha * math.log(share)
    return alpha * (1.0 - share**kappa) / kappa


def gamma_quantile(mean: float, mean_log: float, share: float) -> float:
    """The same for a gamma distribution, its shape from the closed form that comes near maximum likelihood."""
    s = math.log(mean) - mean_log
    if s <= 1e-9:  # all alike
        return mean
    shape = (3.0 - s + math.sqrt((s - 3.0) ** 2 + 24.0 * s)) / (12.0 * s)
    low, high = 0.0, 1.0
    while _gamma_tail(shape, high) > share:
        high *= 2.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _gamma_tail(shape, middle) > share else (low, middle)
    return high * mean / shape


def _gamma_tail(shape: float, x: float) -> float:
    values = torch.tensor([shape, x], dtype=torch.float64)
    return float(torch.special.gammaincc(values[0], values[1]))


def fitted_threshold(magnitudes: Tensor, density: float, num_stages: int, distribution: Distribution) -> float:
    """A threshold that about a share `density` of the magnitudes reaches.

    1. the distribution is fitted to all magnitudes; its quantile is the first threshold: of the share `density` if
       there is one stage, else of a quarter
    2. each further stage is fitted to what exceeds the last threshold, an exponential one or, after a gamma or Pareto
       stage, a generalised Pareto distribution, and keeps ``(density / 0.25) ** (1 / (num_stages - 1))`` of it

    Args:
        magnitudes: float [n], not empty, all positive and finite.
        density: Lies in (0, 1).
        num_stages: More: nearer to the density, whatever the true distribution is.
        distribution: What the first stage fits.
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
    if distribution == "gamma":
        return gamma_quantile(mean, float(values.log().mean()), share)
    return pareto_quantile(mean, float(values.var(correction=0)), share)
