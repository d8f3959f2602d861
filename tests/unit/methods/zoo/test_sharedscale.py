"""Methods with a shared scale: exact sums, agreed steps, no bias."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lowbit_strategy.methods.zoo.sharedscale import MultiScale, SharedScale, TernGrad
from testing.worlds.one_tensor import OneTensor, gaussian

BLOCK = 64
SHAPE = (6, 50)
Z, STEPS = 5.5, 150  # as in tests/unit/methods/zoo/test_quantizers.py


def gradients(world_size: int) -> list[torch.Tensor]:
    return [gaussian(SHAPE, rank) * (1 + rank) for rank in range(world_size)]


def shared_norm(g: list[torch.Tensor]) -> torch.Tensor:
    """One number per element: the largest magnitude of its block on any rank."""
    largest = torch.stack([x.reshape(-1).abs() for x in g]).amax(0)
    norms = [block.max().expand(block.numel()) for block in largest.split(BLOCK)]
    return torch.cat(norms)


@pytest.mark.parametrize(("world_size", "bits"), [(1, 4), (2, 2), (3, 8)])
def test_shared_scale_is_its_definition(world_size: int, bits: int) -> None:
    """Sums of integers in [-s, s] times ``w / s / W``, unbiased."""
    s = 2 ** (bits - 1) - 1
    g = gradients(world_size)
    ranks = OneTensor(SharedScale(bits=bits, block_size=BLOCK, exempt=()), SHAPE, world_size)
    step_N = (shared_norm(g) / s).double().numpy()
    results = np.stack([ranks.step(g).double().numpy() for _ in range(STEPS)])
    integers = results * world_size / step_N
    assert np.allclose(integers, np.round(integers), atol=1e-3)
    assert np.abs(integers).max() <= world_size * s + 1e-3
    exact = np.stack([x.reshape(-1).double().numpy() for x in g]) / step_N
    fraction = exact - np.floor(exact)
    deviation = step_N / world_size * np.sqrt((fraction * (1 - fraction)).sum(0))
    error = np.abs(results.mean(0) - (exact * step_N).mean(0))
    assert (error <= Z * deviation / np.sqrt(STEPS) + 1e-6).all()


def test_sums_fit_any_world_size() -> None:
    """Eight bits on nine ranks: a sum of 9 * 127 overflows an int8, and neither the result nor the wire does."""
    g = [torch.ones(SHAPE)] * 9
    ranks = OneTensor(SharedScale(bits=8, block_size=BLOCK, exempt=()), SHAPE, 9)
    assert torch.allclose(ranks.step(g), torch.ones(300), rtol=1e-6)


def test_multi_scale_is_finer_where_all_ranks_agree() -> None:
    """Two shared steps; the finer one for exactly those elements that are small on every rank."""
    bits, finer_bits = 4, 3
    s, ratio = 2 ** (bits - 1) - 1, 2**finer_bits
    g = gradients(3)
    norm_N = shared_norm(g)
    fits = torch.stack([x.reshape(-1).abs() * ratio <= norm_N for x in g]).all(0)
    assert 5 < fits.sum() < 295
    ranks = OneTensor(MultiScale(bits=bits, finer_bits=finer_bits, block_size=BLOCK, exempt=()), SHAPE, 3)
    step_N = torch.where(fits, norm_N / (s * ratio), norm_N / s).double()
    results = torch.stack([ranks.step(g).double() for _ in range(STEPS)])
    integers = results * 3 / step_N
    assert torch.allclose(integers, integers.round(), atol=1e-3)
    assert (integers.abs().amax(0)[fits] <= 3 * s).all()
    mean = torch.stack([x.reshape(-1).double() for x in g]).mean(0)
    error = (results.mean(0) - mean).abs()
    assert (error <= Z * step_N / np.sqrt(3 * 4 * STEPS) + 1e-6).all()  # a Bernoulli's deviation is at most a half


def test_multi_scale_beats_one_scale_of_the_same_bits() -> None:
    g = [gaussian((8, 128), rank) ** 3 for rank in range(2)]
    mean = torch.stack(g).mean(0).reshape(-1)
    errors = []
    for compressor in (SharedScale(bits=4), MultiScale(bits=4)):
        ranks = OneTensor(compressor, (8, 128), 2)
        errors.append(sum(float((ranks.step(g) - mean).norm()) for _ in range(10)))
    assert errors[1] < 0.8 * errors[0]


def test_terngrad_with_a_shared_scaler_sums_trits() -> None:
    world_size = 3
    g = gradients(world_size)
    ranks = OneTensor(TernGrad(block_size=BLOCK, clip_sigmas=None, exempt=()), SHAPE, world_size)
    scaler_N = shared_norm(g)
    results = torch.stack([ranks.step(g) for _ in range(STEPS)])
    sums = results * world_size / scaler_N
    assert torch.allclose(sums, sums.round(), atol=1e-4)
    assert sums.abs().max() <= world_size + 1e-4
    mean = torch.stack([x.reshape(-1) for x in g]).mean(0)
    assert ((results.mean(0) - mean).abs() <= Z * scaler_N / (2 * np.sqrt(world_size * STEPS))).all()


def test_terngrad_scaler_is_the_largest_bound_of_any_rank() -> None:
    """Each rank clips at its own sigmas, the scaler is the largest of what is left."""
    g = gradients(2)
    ranks = OneTensor(TernGrad(block_size=BLOCK, clip_sigmas=2.0, exempt=()), SHAPE, 2)
    result = ranks.step(g)
    scaler = []
    for x in g:
        parts = x.reshape(-1).split(BLOCK)
        scaler.append([min(part.abs().max(), 2.0 * part.std(unbiased=False)) for part in parts])
    expected = torch.tensor(scaler).amax(0).repeat_interleave(BLOCK)[:300]
    sent = result.abs() > 0
    sums = (result.abs() * 2 / expected)[sent]
    assert torch.allclose(sums, sums.round(), atol=1e-4)


def test_terngrad_ranks_clip_at_their_own_bound() -> None:
    """A rank's outlier is clipped by what is usual on that rank, although the scaler that all share is larger."""
    loud, quiet = torch.full(SHAPE, 50.0), torch.ones(SHAPE)
    quiet[0, 0] = 50.0
    bound = 2.0 * quiet.reshape(-1)[:BLOCK].std(unbiased=False)
    assert 10 < bound < 15
    ranks = OneTensor(TernGrad(block_size=BLOCK, clip_sigmas=2.0, exempt=()), SHAPE, 2)
    mean = sum(ranks.step([loud, quiet])[0] for _ in range(STEPS)) / STEPS
    deviation = 25.0 * (bound / 50.0 * (1 - bound / 50.0)).sqrt() / np.sqrt(STEPS)
    assert abs(mean - (50.0 + bound) / 2) < Z * deviation < 10


def test_bytes_of_shared_trits() -> None:
    """1.6 bits uplink, three bits downlink on two ranks (five values: three to a byte), half of the tensor each."""
    ranks = OneTensor(TernGrad(), (60, 1024), 2)
    agreed = 2 * 60 * 4 // 2
    assert ranks.syncs[0].state.sent_nbytes("p") == 30 * 1024 // 5 + 30 * 1024 // 3 + agreed
