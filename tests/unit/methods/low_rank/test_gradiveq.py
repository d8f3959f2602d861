"""GradiVeQ: a subspace that the ranks have in common."""

from __future__ import annotations

import torch

from lowbit_strategy import GradiVeQ
from testing.worlds.one_tensor import OneTensor, gaussian

SHAPE = (64, 128)


def test_slices_in_a_common_subspace_arrive_whole() -> None:
    """8 of 64 dims: what the leader finds in its slices holds for the other rank's."""
    subspace = torch.linalg.qr(gaussian((64, 8), 0)).Q
    gradients = [(gaussian((128, 8), rank) @ subspace.T).view(*SHAPE) for rank in range(2)]
    matrix = OneTensor(GradiVeQ(slice_size=64, ratio=8), SHAPE, 2)
    torch.testing.assert_close(matrix.step(gradients).view(SHAPE), sum(gradients) / 2, rtol=0, atol=1e-4)
    turned = [gradient.roll(1, 1) for gradient in gradients]
    assert float((matrix.step(turned).view(SHAPE) - sum(turned) / 2).norm() / turned[0].norm()) > 0.1
    assert matrix.world.comms[1].sent_nbytes * 8 < matrix.world.comms[0].sent_nbytes * 8 < 2 * 4 * 8192 * 2
