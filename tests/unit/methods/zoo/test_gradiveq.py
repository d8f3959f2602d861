"""GradiVeQ: a subspace that the ranks have in common."""

from __future__ import annotations

from dataclasses import replace

import torch

from lowbit_strategy import GradiVeQ
from lowbit_strategy.collectives.layout import TensorSpec
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


def test_slices_that_share_rows_do_not_keep_zeros_and_whole_slices_do() -> None:
    """Rows of 96 elements in slices of 64: the first slice of two is the row's own."""
    gradients = [gaussian((96, 96), rank) for rank in range(2)]
    for gradient in gradients:
        gradient[4] = 0.0  # slices 6 and a half of 7
    compressor = GradiVeQ(slice_size=64, ratio=8)
    row = OneTensor(compressor, (96, 96), 2).step(gradients).view(96, 96)[4]
    assert not row[:64].any()
    assert row[64:].any()
    spec = TensorSpec("matrix", (96, 96))
    assert not any(compressor.method(spec).keeps_zero_rows(each) for each in (spec, replace(spec, sharded=True)))
