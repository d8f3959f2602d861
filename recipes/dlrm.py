"""A recommender whose embedding tables are split over the ranks: rows travel within a bound, dense gradients at 4 bits.

    torchrun --nproc-per-node 2 recipes/dlrm.py
    torchrun --nproc-per-node 2 recipes/dlrm.py --bound 0

Every rank has some tables whole and a part of each batch. Rows go from the rank that has them to the rank that asked,
their gradients go back, both by `functional.all_to_all`. Clicks are made: what users and things have in common decides.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import LoCo, functional
from lowbit_strategy.codecs.base import DenseCodec
from lowbit_strategy.custom_loop import attach_ddp, prepare

NUM_TABLES, NUM_ROWS, WIDTH, NUM_DENSE = 8, 1000, 16, 4


class Clicks:
    """Ids, numbers, and whether there was a click: the sign of a sum of products of hidden vectors, with noise."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._hidden = torch.randn(NUM_TABLES, NUM_ROWS, 4, generator=generator)
        self._weights = torch.randn(NUM_DENSE, generator=generator)

    def batch(self, size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        ids = (NUM_ROWS * torch.rand(size, NUM_TABLES, generator=generator) ** 3).long()  # few rows are asked for often
        dense = torch.randn(size, NUM_DENSE, generator=generator)
        vectors = self._hidden[torch.arange(NUM_TABLES), ids]
        total = vectors.sum(1)
        score = (total.square() - vectors.square().sum(1)).sum(1) / 8 + dense @ self._weights
        return ids, dense, (score + torch.randn(size, generator=generator) > 0).float()


class SplitTables(nn.Module):
    """This rank's tables, which serve all ranks.

    Args:
        rows: Code of rows.
        gradients: Code of their gradients, which are far smaller than any bound that suits rows.
    """

    def __init__(self, rows: functional.Code, gradients: functional.Code) -> None:
        super().__init__()
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._codes = (rows, gradients)
        tables = [
            nn.Embedding(NUM_ROWS, WIDTH) for _ in range(NUM_TABLES)
        ]  # all, to begin alike on any number of ranks
        for table in tables:
            nn.init.normal_(table.weight, std=0.1)
        self.tables = nn.ModuleList(tables[self._rank :: self._world_size])

    def forward(self, ids_BT: Tensor) -> Tensor:
        """float32 [B, T, WIDTH], tables in the order of the ranks that have them."""
        size, world_size = len(ids_BT), self._world_size
        asked_WB = torch.stack([ids_BT[:, rank::world_size] for rank in range(world_size)])
        wanted_WB = torch.empty_like(asked_WB)
        dist.all_to_all_single(wanted_WB, asked_WB)
        rows = [table(wanted_WB[..., index]) for index, table in enumerate(self.tables)]
        sent_WBTD = torch.stack(rows, 2)  # row r is for rank r
        received_WBTD = functional.all_to_all(sent_WBTD, self._codes[0], backward=self._codes[1])
        return received_WBTD.permute(1, 0, 2, 3).reshape(size, NUM_TABLES, WIDTH)


def interactions(vectors_BTD: Tensor, dense: Tensor) -> Tensor:
    """All products of two tables' vectors, beside the numbers."""
    products = torch.bmm(vectors_BTD, vectors_BTD.transpose(1, 2))
    row, column = torch.triu_indices(NUM_TABLES, NUM_TABLES, 1)
    return torch.cat([products[:, row, column], vectors_BTD.flatten(1), dense], 1)


@contextlib.contextmanager
def counted_rows() -> Iterator[list[int]]:
    """Bytes of coded rows and gradients of rows that this process sends to others."""
    sent, original, rank = [0], dist.all_to_all_single, dist.get_rank()

    def counting(out: Tensor, x: Tensor, *splits: list[int], **options: Any) -> Any:
        if x.dtype == torch.uint8 and splits:  # the dense gradients' parts are equal
            sent[0] += sum(splits[1]) - splits[1][rank]
        return original(out, x, *splits, **options)

    dist.all_to_all_single = counting
    try:
        yield sent
    finally:
        dist.all_to_all_single = original


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bound", type=float, default=1e-2, help="no element of a row is further off; 0: exact")
    parser.add_argument("--gradient-bits", type=int, default=8, help="of the gradients of rows")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=256, help="of a rank")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    exact = options.bound == 0
    plain = DenseCodec("float32")
    tables = SplitTables(*((plain, plain) if exact else (functional.Bounded(options.bound), options.gradient_bits)))
    inputs = NUM_TABLES * (NUM_TABLES - 1) // 2 + NUM_TABLES * WIDTH + NUM_DENSE
    net = nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 1))
    prepared = prepare(net, LoCo(bits=4))
    model = DistributedDataParallel(net)
    session = attach_ddp(model, prepared)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    table_optimizer = torch.optim.Adagrad(tables.parameters(), lr=0.05)
    clicks = Clicks()
    with counted_rows() as sent:
        for step in range(options.steps):
            ids, dense, clicked = clicks.batch(options.batch, 1 + step * world_size + rank)
            optimizer.zero_grad()
            table_optimizer.zero_grad()
            session.begin_step()
            score = model(interactions(tables(ids), dense)).squeeze(1)
            nn.functional.binary_cross_entropy_with_logits(score, clicked).backward()
            optimizer.step()
            table_optimizer.step()  # its rows' gradients have come from all ranks
            session.end_step(optimizer)
    session.finish()
    with torch.no_grad():
        ids, dense, clicked = clicks.batch(20_000, -1)  # the same on all ranks, which ask together
        right = (model.module(interactions(tables(ids), dense)).squeeze(1) > 0) == clicked.bool()
    if rank == 0:
        how = "exact" if exact else f"within {options.bound:g}"
        per_step = sent[0] / options.steps / 1e3
        print(
            f"rows {how}: accuracy {right.float().mean():.4f}, {per_step:.1f} kB of rows and their gradients per step"
        )
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
