"""DDP's first step, whose single bucket is reduced in pieces: the same bits as if it were reduced whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import preset
from lowbit_strategy.attach.ddp import attach_ddp
from lowbit_strategy.attach.prepare import prepare
from lowbit_strategy.hooks.ddp import DDPHook
from testing.processes.scenarios import Facts, scenarios
from testing.training.comparing import fingerprint

WIDTH, NUM_MODULES = 96, 6


def in_pieces_and_whole(folder: Path, method: str) -> Facts:
    """Three steps, with DDP's own buckets after the first; `whole`: no bucket is ever cut."""
    facts: Facts = {}
    for kind in ("pieces", "whole"):
        with pytest.MonkeyPatch.context() as patch:
            num_pieces: list[int] = []
            cut = DDPHook.cut

            def seen(self: DDPHook, bucket: object, *, kind=kind, num_pieces=num_pieces, cut=cut) -> object:
                if kind == "whole":
                    self.cap_nbytes = 2**62
                found = cut(self, bucket)
                num_pieces.append(len(found[0]))
                return found

            patch.setattr(DDPHook, "cut", seen)
            torch.manual_seed(0)
            net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_MODULES)))
            prepared = prepare(net, preset(method))
            model = DistributedDataParallel(net, bucket_cap_mb=0.05)
            session = attach_ddp(model, prepared)
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
            for step in range(3):
                session.begin_step()
                x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                session.end_step()
            session.close()
        facts[kind] = {"first": num_pieces[0], "later": max(num_pieces[1:]), "bits": fingerprint(net)}
    return facts


@scenarios(in_pieces_and_whole, method=("loco", "topk", "powersgd", "exdyna"))
def test_pieces_of_the_first_bucket_give_the_bits_of_the_whole(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["pieces"]["first"] > 2
        assert rank["pieces"]["later"] == 1
        assert rank["whole"]["first"] == 1
        assert rank["pieces"]["bits"] == rank["whole"]["bits"] == facts[0]["pieces"]["bits"]
