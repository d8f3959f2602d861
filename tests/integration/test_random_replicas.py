"""Random sequences of what scripts do with a model under DDP and with local steps, against plain PyTorch.

With `Dense` the run is that of DDP without this package; local steps without an outer optimizer are plain averaging of
weights. With LoCo nothing but rounding has another result: what does not change weights (validating, looking, saving,
a second fit of the same model) is inserted at random, and changes not one bit.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import Dense, LocalSGD, LoCo
from lowbit_strategy.attach.session import Session
from lowbit_strategy.custom_loop import SyncOptions, attach_ddp, prepare
from testing.processes.ranks import join_group, run_ranks
from testing.training.comparing import close
from testing.training.ddp_loop import CPU

WIDTH = 48
LENGTH = 12
ACTIONS = ("train",) * 4 + ("accumulate", "edit", "save", "load", "freeze", "unfreeze", "again")
HARMLESS = ("evaluate", "look", "mode", "write")
EVERY = 3  # local steps of a round


class Program:
    """One model and the actions of one seed on it; all ranks take the same ones, with data of their own.

    Args:
        compressor: None: plain DDP.
        local: Local steps; without a compressor the mean of all weights is taken every `EVERY` steps.
    """

    def __init__(self, compressor: Any, folder: Path, *, local: bool) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(3)))
        self.compressor, self.local = compressor, local
        self.options = SyncOptions(outer=LocalSGD(every=EVERY) if local else None)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.generator = torch.Generator().manual_seed(dist.get_rank())
        self.session: Session | None = None
        self.model = self.wrap()
        self.folder, self.saved, self.seen = folder, None, list[float]()
        self.since = 0  # steps since the weights were averaged

    def wrap(self) -> DistributedDataParallel:
        """A fit begins."""
        earlier = self.session
        prepared = None if self.compressor is None else prepare(self.net, self.compressor, self.options)
        model = DistributedDataParallel(self.net)
        if prepared is not None:
            self.session = attach_ddp(model, prepared, device=CPU)
            if earlier is not None:
                self.session.adopt(earlier)
                earlier.close()
            self.session.bind(lambda: [self.optimizer], lambda: None)
            self.session.resume()
        return model

    # -- what changes weights -------------------------------------------------------------------------------------

    def loss(self) -> Tensor:
        x = torch.randn(4, WIDTH, generator=self.generator)
        model = self.net if self.local and self.session is None else self.model
        loss: Tensor = (model(x) - x.roll(1, 1)).square().mean()
        self.seen.append(loss.item())
        return loss

    def backward(self) -> None:
        loss = self.loss()
        if self.session is not None:
            self.session.begin_step()
        loss.backward()

    def train(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.session is not None:
            self.session.end_step(self.optimizer)
        elif self.local:
            self.since += 1
            if self.since == EVERY:
                self.average()

    @torch.no_grad()
    def average(self) -> None:
        self.since = 0
        for param in self.net.parameters():
            dist.all_reduce(param)
            param /= dist.get_world_size()

    def accumulate(self) -> None:
        with self.model.no_sync():
            self.backward()
        self.train()

    def edit(self) -> None:
        for param in self.net.parameters():
            param.data.mul_(0.97)

    def freeze(self) -> None:
        self.turn(False)

    def unfreeze(self) -> None:
        self.turn(True)

    def turn(self, trains: bool) -> None:
        if trains == self.net[1][0].weight.requires_grad:
            return
        self.net[1].requires_grad_(trains)
        if self.local:
            return
        self.model._remove_autograd_hooks()
        wrapped = DistributedDataParallel(self.net)
        if self.session is not None:
            self.session.extend(wrapped)
        self.model = wrapped

    @torch.no_grad()
    def load(self) -> None:
        if self.saved is None:
            return
        stamp, values, since, kept = self.saved
        for param, value in zip(self.net.parameters(), values, strict=True):
            param.copy_(value)
        self.optimizer.load_state_dict(copy.deepcopy(kept))
        self.since = since
        if self.session is not None:
            self.session.load(self.folder / "some.ckpt", stamp)
            self.session.resume()

    def save(self) -> None:
        with self.saving("some.ckpt") as stamp:
            values = [param.detach().clone() for param in self.net.parameters()]
            self.saved = (stamp, values, self.since, copy.deepcopy(self.optimizer.state_dict()))

    def again(self) -> None:
        """A second fit: local steps end with the mean of all weights, and start over."""
        if self.session is not None:
            self.session.finish()
        elif self.local:
            self.average()
        self.model._remove_autograd_hooks()
        self.model = self.wrap()

    # -- what does not --------------------------------------------------------------------------------------------

    def shared(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.session is None else self.session.shared_weights()

    @torch.no_grad()
    def evaluate(self) -> None:
        self.net.eval()
        with self.shared():
            self.model(torch.ones(4, WIDTH))
        self.net.train()

    def look(self) -> None:
        """A forward pass that no backward pass follows."""
        self.net(torch.ones(4, WIDTH))

    def mode(self) -> None:
        self.net.train(not self.net.training)

    def write(self) -> None:
        """A checkpoint that nothing is loaded from."""
        with self.saving("other.ckpt"):
            pass

    def saving(self, name: str) -> Any:
        return contextlib.nullcontext() if self.session is None else self.session.save(self.folder / name)

    # -- all ------------------------------------------------------------------------------------------------------

    def run(self, actions: list[str]) -> list[float]:
        for action in actions:
            getattr(self, action)()
        self.net.train()
        self.unfreeze()
        for _ in range(EVERY):
            self.train()
        if self.session is not None:
            self.session.finish()
            self.session.close()
        elif self.local:
            self.average()
        return [*self.seen, *(float(param.double().sum()) for param in self.net.parameters())]


def _programs(rank: int, world_size: int, folder: Path, local: bool, seeds: range) -> Any:
    """Seeds of which a run is not its reference's, and why."""
    join_group(rank, world_size, folder, 30)
    wrong = []
    for seed in seeds:
        gc.collect()  # groups of gloo keep their threads as long as anything refers to them
        chosen = random.Random(seed)
        actions = [chosen.choice(ACTIONS) for _ in range(LENGTH)]
        longer = [each for action in actions for each in (*chosen.sample(HARMLESS, chosen.randrange(3)), action)]
        own = folder / str(seed)
        plain = Program(None, own, local=local).run(actions)
        if not close(Program(Dense(), own, local=local).run(longer), plain, 1e-5 if local else 0.0):
            wrong.append((seed, "Dense is not plain PyTorch"))
        compressor = LoCo(block_size=32)
        if Program(compressor, own, local=local).run(actions) != Program(compressor, own, local=local).run(longer):
            wrong.append((seed, "LoCo changes with what is harmless"))
    return wrong


# 288: loaded while a part was frozen, each rank with weights of its own, and trained later.
QUICK = [(False, range(2)), (True, range(2)), (True, range(288, 289))]
SLOW = [(local, range(at, at + 75)) for local in (False, True) for at in range(0, 300, 75)]


@pytest.mark.parametrize(
    ("local", "seeds"), QUICK + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW], ids=str
)
def test_any_sequence_is_that_of_plain_pytorch(tmp_path: Path, local: bool, seeds: range) -> None:
    found = run_ranks(_programs, 2, tmp_path, local, seeds, timeout=280, process_group=None)
    assert found == [[]] * 2


def _saved_twice(rank: int, world_size: int, folder: Path) -> Any:
    """Weights are changed between two saves of one step: those of the second, those loaded, and the files."""
    join_group(rank, world_size, folder, 30)
    program = Program(Dense(), folder, local=True)
    for _ in range(4):
        program.save()
        program.edit()
    program.save()
    wanted = [param.tolist() for param in program.net.parameters()]
    program.train()
    program.load()
    dist.barrier()
    found = [param.tolist() for param in program.net.parameters()]
    return found == wanted, len(list((folder / "some.ckpt.lowbit").iterdir()))


def test_a_save_replaces_an_earlier_one_of_the_same_step(tmp_path: Path) -> None:
    assert run_ranks(_saved_twice, 2, tmp_path, timeout=60, process_group=None) == [(True, 2)] * 2
