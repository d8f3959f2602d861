"""Sign methods against NumPy transcriptions of their definitions, step by step on several ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.methods.efsignsgd import EFSignSGD
from lowbit_strategy.methods.signsgd import SignSGD
from lowbit_strategy.methods.zoo.onebitsgd import OneBitSGD
from testing.sign_blocks import BLOCK, blocks, scaled_sign, two_means
from testing.worlds.one_tensor import OneTensor, gaussian

SHAPE = (5, 40)


def gradients(step: int, world_size: int) -> list[torch.Tensor]:
    return [gaussian(SHAPE, 100 * step + rank) * (1 + rank) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_signsgd_is_the_sign_of_the_sum_of_signs(world_size: int) -> None:
    ranks = OneTensor(SignSGD(block_size=BLOCK, exempt=()), SHAPE, world_size)
    g = gradients(0, world_size)
    result = ranks.step(g).numpy()
    flat = np.stack([x.reshape(-1).numpy() for x in g])
    votes = np.sign(np.where(flat >= 0, 1, -1).sum(0))
    assert np.array_equal(np.sign(result), votes)
    for k, vote in enumerate(blocks(votes)):
        magnitude = np.mean([np.abs(blocks(x)[k]).mean() for x in flat])
        sent = result[k * BLOCK : k * BLOCK + vote.size]
        assert np.allclose(sent, vote * magnitude, rtol=2.0**-6)  # two scales, each rounded to bfloat16


def test_signsgd_of_magnitude_one() -> None:
    ranks = OneTensor(SignSGD(block_size=BLOCK, scale="one", exempt=()), SHAPE, 3)
    g = gradients(0, 3)
    votes = torch.stack([x.reshape(-1).sign() for x in g]).sum(0).sign()
    assert torch.equal(ranks.step(g), votes)


def test_signsgd_ranks_without_gradient_abstain() -> None:
    ranks = OneTensor(SignSGD(block_size=BLOCK, scale="one", exempt=()), SHAPE, 3)
    g = [-gaussian(SHAPE, 0).abs(), torch.zeros(SHAPE), torch.zeros(SHAPE)]
    assert torch.equal(ranks.step(g), -torch.ones(200))


@pytest.mark.parametrize("scale", ["one", "mean_abs"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_signsgd_passes_on_what_is_not_finite(scale: str, value: float) -> None:
    """In the whole block, on every rank, and nowhere else; the step after is clean."""
    ranks = OneTensor(SignSGD(block_size=BLOCK, scale=scale, exempt=()), SHAPE, 3)  # type: ignore[arg-type]
    g = gradients(0, 3)
    g[1][0, 3] = value
    results = [x.reshape(-1).clone() for x in g]
    ranks.world.reduce(ranks.syncs, BucketLayout((("p", 0),)), results, results)
    for result in results:
        assert not result[:BLOCK].isfinite().any()
        assert result[BLOCK:].isfinite().all()
    assert ranks.step(gradients(1, 3)).isfinite().all()


def test_signsgd_zeros_vote_for_neither_side() -> None:
    """A zero beside other values is drawn at random: over many steps it votes as often for as against."""
    ranks = OneTensor(SignSGD(block_size=BLOCK, scale="one", exempt=()), (1, BLOCK), 1)
    g = torch.ones(1, BLOCK)
    g[0, 1::2] = 0.0
    results = torch.stack([ranks.step([g]) for _ in range(200)])
    assert torch.equal(results[:, 0::2], torch.ones_like(results[:, 0::2]))
    assert results[:, 1::2].mean().abs() < 0.05  # 6400 draws: four standard deviations
    assert results[:, 1::2].mean(0).abs().max() < 0.4


@pytest.mark.parametrize("world_size", [1, 3])
def test_signum_votes_with_local_momenta(world_size: int) -> None:
    """``m = beta m + (1 - beta) g`` on every rank, at first g; the sign of the sum of signs of m. In NumPy."""
    ranks = OneTensor(SignSGD(block_size=BLOCK, scale="one", momentum=0.8, exempt=()), SHAPE, world_size)
    m = np.zeros((world_size, 200), np.float32)
    for step in range(5):
        g = gradients(step, world_size)
        flat = np.stack([x.reshape(-1).numpy() for x in g])
        m = flat if step == 0 else np.float32(0.8) * m + np.float32(0.2) * flat
        assert np.array_equal(ranks.step(g).numpy(), np.sign(np.sign(m).sum(0)))


def test_signum_gives_all_parameters_the_same_momentum() -> None:
    """Exempt ones uncompressed, high-precision ones in 8 bits."""
    for compressor, shape, tolerance in (
        (SignSGD(momentum=0.5), (200,), 1e-6),  # exempt as a vector
        (SignSGD(momentum=0.5, high_precision=("p",)), (64, 64), 0.05),
    ):
        ranks = OneTensor(compressor, shape, 2)
        ranks.step([torch.ones(shape), torch.ones(shape)])
        result = ranks.step([torch.zeros(shape), 2.0 * torch.ones(shape)])
        assert torch.allclose(result, torch.full_like(result, 1.0), atol=tolerance)  # (0.5 + 1.5) / 2
        assert set(ranks.state(0)) == {"uplink.momentum"}


def transcribed_feedback(quantize, world_size: int, steps: int) -> list[np.ndarray]:  # type: ignore[no-untyped-def]
    """``p = g + e``, ``Q = quantize(p)``, ``e = p - Q`` on every rank and again at the owner, in float32."""
    e = [np.zeros(200, np.float32) for _ in range(world_size)]
    owner_e = np.zeros(200, np.float32)
    results = []
    for step in range(steps):
        total = np.zeros(200, np.float32)
        for rank, g in enumerate(gradients(step, world_size)):
            p = g.reshape(-1).numpy() + e[rank]
            sent = np.concatenate([quantize(block) for block in blocks(p)])
            e[rank] = p - sent
            total += sent
        p = total * np.float32(1.0 / world_size) + owner_e
        sent = np.concatenate([quantize(block) for block in blocks(p)])
        owner_e = p - sent
        results.append(sent)
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_efsignsgd_is_its_definition(world_size: int) -> None:
    """Blocks do not straddle owners, so the whole tensor can be transcribed as one."""
    ranks = OneTensor(EFSignSGD(block_size=BLOCK, exempt=()), SHAPE, world_size)
    for step, expected in enumerate(transcribed_feedback(scaled_sign, world_size, 6)):
        result = ranks.step(gradients(step, world_size)).numpy()
        assert np.allclose(result, expected, rtol=1e-6), f"step {step}"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_onebitsgd_is_its_definition(world_size: int) -> None:
    ranks = OneTensor(OneBitSGD(block_size=BLOCK, exempt=()), SHAPE, world_size)
    for step, expected in enumerate(transcribed_feedback(two_means, world_size, 6)):
        result = ranks.step(gradients(step, world_size)).numpy()
        assert np.allclose(result, expected, rtol=1e-6), f"step {step}"


@pytest.mark.parametrize("compressor", [SignSGD(), EFSignSGD(), OneBitSGD()])
def test_bytes_are_an_eighth_of_a_byte_an_element_and_scales(compressor: SignSGD | EFSignSGD | OneBitSGD) -> None:
    ranks = OneTensor(compressor, (64, 1024), 2)
    per_element = ranks.syncs[0].state.sent_nbytes("p") / 65536
    scale = {"signsgd": 2, "efsignsgd": 2, "onebitsgd": 4}[compressor.name] / compressor.block_size
    uplink = (1 / 8 + scale) / 2  # half of the tensor goes to the other rank
    downlink = (52 / 256 + 2 / 256) / 2 if compressor.name == "signsgd" else uplink
    assert per_element == pytest.approx(uplink + downlink)
