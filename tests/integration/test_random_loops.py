"""Random training loops: several optimizers, nested ones, gradients that are cleared or kept, skipped steps.

A run with `Dense` is a run without this package, but for the order of sums. With any compressor ranks end alike, a run
is the same to the bit with a validation and a checkpoint in between, and however the loop tells its steps. Where
nothing moves, what optimizers are given and what is left in residuals add up to what they get without compression.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import PRESETS, Dense, DiLoCo, LocalSGD, LoCo, StreamingDiLoCo, TopK
from lowbit_strategy.custom_loop import SyncOptions, attach_ddp, attach_fsdp, compress, prepare
from testing.processes.ranks import join_group, run_ranks
from testing.training.comparing import close, full
from testing.training.optimizers import Lookahead

WIDTH, LENGTH = 32, 10
COMPRESSORS = (LoCo(block_size=32), LoCo(bits=2, block_size=32), TopK(density=0.1), PRESETS["powersgd"])
CONSERVING = (LoCo(block_size=32, residual="float32"), TopK(density=0.1), LoCo(bits=2, residual="float32"))
RULES = (DiLoCo(every=3), LocalSGD(every=2), StreamingDiLoCo(every=4, fragments=2, delay=1))


class Two(nn.Module):
    """Two networks, the second of which judges what the first makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)
        )

    def forward(self, x: Tensor, which: str) -> Tensor:
        if which == "second":
            return self.second(x)
        made: Tensor = self.first(x)
        return made if which == "first" else self.second(made)


MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "lookahead": lambda params: Lookahead(torch.optim.AdamW(params, lr=1e-3)),
}


class Loop:
    """One run of a program.

    Args:
        how: ``stock``, ``one call``, ``by hand`` or ``never ended``.
        still: Learning rates are zero, and no step is skipped.
    """

    def __init__(self, kind: str, seed: int, how: str, compressor: Any, folder: Path, *, still: bool = False) -> None:
        self.choice = random.Random(seed)
        names = [self.choice.choice(list(MAKE)) for _ in range(2)]
        self.to_none = self.choice.random() < 0.7
        scaled = kind == "ddp" and self.choice.random() < 0.3 and not still
        outer = self.choice.choice(RULES) if kind == "local" else None
        torch.manual_seed(0)
        self.net, self.how, self.folder, self.is_sharded = Two(), how, folder, kind == "fsdp"
        by_hand = how in ("by hand", "never ended")
        if by_hand:
            prepared = prepare(self.net, compressor, SyncOptions(outer=outer), scatter=self.is_sharded)
        self.model: Any = self._wrap()
        self.parts = (list(self.net.first.parameters()), list(self.net.second.parameters()))
        self.optimizers = [MAKE[name](part) for name, part in zip(names, self.parts, strict=True)]
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups if still):
            group["lr"] = 0.0
        self.totals = [torch.zeros_like(param) for part in self.parts for param in part]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if scaled else None
        self.session: Any = None
        if by_hand:
            attach: Any = attach_fsdp if self.is_sharded else attach_ddp
            self.session = attach(self.model, prepared, has_scaler=scaled)
            self.session.bind(lambda: self.optimizers, lambda: self.scaler)
            self.session.resume()
        elif how == "one call":
            self.session = compress(self.model, self.optimizers, compressor, scaler=self.scaler, outer=outer)
        self.generator = torch.Generator().manual_seed(dist.get_rank())
        self.losses: list[float] = []

    def _wrap(self) -> Any:
        if not self.is_sharded:
            return DistributedDataParallel(self.net, bucket_cap_mb=0.005, find_unused_parameters=True)
        for part in (self.net.first, self.net.second):
            fully_shard(part)
        return fully_shard(self.net)

    # -- what a loop does -------------------------------------------------------------------------------------------

    def backward(self, which: str, *, overflows: bool = False, factor: float = 1.0) -> Tensor:
        x = torch.randn(4, WIDTH, generator=self.generator)
        loss = factor * (self.model(x, which) - x.roll(1, 1)).square().mean()
        self.losses.append(loss.item())
        if self.session is not None and self.how != "one call":
            self.session.begin_step(self.scaler)
        scaled = loss if self.scaler is None else self.scaler.scale(loss * float("inf") if overflows else loss)
        scaled.backward()
        return loss

    def step(self, at: int) -> None:
        optimizer = self.optimizers[at]
        if all(param.grad is None for param in self.parts[at]):
            return
        if self.scaler is None:
            self.add_up(at)
            optimizer.step()
        else:
            self.scaler.step(optimizer)
        if self.how == "by hand" or (self.how == "never ended" and self.scaler is not None):
            self.session.end_step(optimizer)

    def add_up(self, at: int) -> None:
        """What the optimizer is given."""
        before = len(self.parts[0]) * at
        for total, param in zip(self.totals[before:], self.parts[at], strict=False):
            if param.grad is not None:
                total.data.add_(param.grad)

    def update(self) -> None:
        if self.scaler is not None:
            self.scaler.update()

    def clear(self, *which: int) -> None:
        for at in which:
            self.optimizers[at].zero_grad(set_to_none=self.to_none)

    def together(self) -> None:
        self.clear(0, 1)
        self.backward("both", overflows=self.choice.random() < 0.3)
        self.step(0)
        self.step(1)
        self.update()

    def first_alone(self) -> None:
        """The second's gradients are thrown away."""
        self.clear(0, 1)
        self.backward("both")
        self.step(0)
        self.update()
        self.clear(0, 1)

    def second_alone(self) -> None:
        self.clear(0, 1)
        self.backward("second")
        self.step(1)
        self.update()

    def in_turns(self) -> None:
        self.first_alone()
        self.second_alone()

    def thrown_away(self) -> None:
        self.backward(self.choice.choice(["both", "first", "second"]))
        self.clear(0, 1)

    def spiked(self) -> None:
        """A step is skipped because its gradients are too large."""
        self.clear(0, 1)
        self.backward("both", factor=1e4)
        self.clear(0, 1)

    def surgery(self) -> None:
        """One backward pass per task, then a step on the mean of what they gave. What was cleared before it since the
        last step would count as well.
        """
        self.together()
        kept: list[list[Tensor]] = []
        params = [*self.parts[0], *self.parts[1]]
        for _ in range(self.choice.choice([2, 3])):
            self.clear(0, 1)
            self.backward("both")
            kept.append([param.grad.clone() for param in params if param.grad is not None])
        self.clear(0, 1)
        for param, *grads in zip(params, *kept, strict=True):
            param.grad = sum(grads[1:], grads[0]) / len(grads)
        self.step(0)
        self.step(1)
        self.update()

    def taken_away(self) -> None:
        """Some gradients are taken from the optimizer."""
        self.clear(0, 1)
        self.backward("both")
        for param in self.parts[1]:
            param.grad = None
        self.step(0)
        self.update()

    def added(self) -> None:
        """A micro-batch is not synchronized."""
        self.clear(0, 1)
        if self.is_sharded:
            self.model.set_requires_gradient_sync(False)
            self.backward("both")
            self.model.set_requires_gradient_sync(True)
        else:
            with self.model.no_sync():
                self.backward("both")
        self.backward("both")
        self.step(0)
        self.step(1)
        self.update()

    def closure(self) -> None:
        """The optimizer itself calls backward."""
        if self.scaler is not None:
            self.together()
            return
        self.clear(0, 1)

        @torch.enable_grad()
        def closure() -> Tensor:
            loss = self.backward("both")
            self.add_up(1)
            return loss

        self.optimizers[1].step(closure)
        if self.how == "by hand":
            self.session.end_step(self.optimizers[1])
        self.clear(0, 1)

    # -- what must not matter ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def glance(self) -> None:
        """A validation, a checkpoint and a copy that nobody asked for."""
        shared: Any = contextlib.nullcontext() if self.session is None else self.session.shared_weights(validates=False)
        with shared:
            self.model.eval()
            self.model(torch.ones(4, WIDTH), "both")
            self.model.train()
        if self.session is not None:
            with self.session.save(self.folder / "glance.ckpt"):
                pass
        copy.deepcopy([part.state_dict() for part in (self.net.first, self.net.second)])

    def run(self, *, glances: bool = False) -> list[float]:
        actions = [self.together, self.first_alone, self.second_alone, self.in_turns]
        actions += [self.thrown_away, self.spiked, self.surgery, self.taken_away, self.added, self.closure]
        self.together()  # FSDP2 reduces no module that has never been gathered, and a glance gathers all
        for _ in range(LENGTH):
            self.choice.choice(actions)()
            if glances:
                self.glance()
        self.together()
        if self.session is not None:
            self.session.finish()
            self.session.close()
        return [*self.losses, *self.sums()]

    def warm_up(self) -> None:
        """Gradients are thrown away; the next such reductions are rolled back."""
        self.backward("both")
        self.clear(0, 1)
        if self.session is not None:
            self.session.begin_step()
            self.session.sync.forget()

    def conserved(self) -> list[Tensor]:
        """What optimizers were given, and what ranks have not sent of it."""
        self.run()
        found = []
        names = [name for name, _ in self.net.named_parameters()]
        for name, total in zip(names, self.totals, strict=True):
            whole = full(total)
            unsent = None if self.session is None else self.session.sync.state.export_unsent(name)
            if unsent is not None:
                dist.all_reduce(unsent)
                whole += unsent.view_as(whole) / dist.get_world_size()
            found.append(whole)
        return found

    def sums(self) -> Iterator[float]:
        for param in (*self.parts[0], *self.parts[1]):
            yield float((param.to_local() if self.is_sharded else param).double().sum())


def _programs(rank: int, world_size: int, folder: Path, kind: str, seeds: list[int]) -> Any:
    """What is not as it has to be: seed and comparison."""
    join_group(rank, world_size, folder, 30)
    wrong = []
    for seed in seeds:
        gc.collect()  # groups of gloo keep their threads as long as anything refers to them
        compressor = COMPRESSORS[seed % len(COMPRESSORS)]
        one = Loop(kind, seed, "one call", compressor, folder)
        found = one.run()
        alike = [None] * world_size
        dist.all_gather_object(alike, list(one.sums()))
        wrong += [(seed, "ranks")] if kind != "fsdp" and any(each != alike[0] for each in alike) else []
        wrong += [(seed, "finite")] if not all(each == each for each in list(one.sums())) else []
        for how in ("by hand", "never ended"):
            other = Loop(kind, seed, how, compressor, folder).run()
            wrong += [(seed, how)] if other != found else []
        other = Loop(kind, seed, "one call", compressor, folder).run(glances=True)
        wrong += [(seed, "glances")] if other != found else []
        if kind != "local":
            compressor = CONSERVING[seed % len(CONSERVING)]
            kept = Loop(kind, seed, "one call", compressor, folder, still=True)
            kept.warm_up()
            stock = Loop(kind, seed, "stock", None, folder, still=True)
            stock.warm_up()
            pairs = zip(kept.conserved(), stock.conserved(), strict=True)
            wrong += [] if all(torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in pairs) else [(seed, "conserved")]
            dense = Loop(kind, seed, "one call", Dense(), folder).run()
            plain = Loop(kind, seed, "stock", None, folder).run()
            wrong += [(seed, "stock")] if not close(dense, plain, 1e-4) else []
    return wrong


QUICK = [("ddp", 1), ("fsdp", 1), ("local", 1)]
SLOW = [(kind, at) for kind in ("ddp", "fsdp", "local") for at in range(10)]


@pytest.mark.parametrize(("kind", "count"), QUICK, ids=str)
def test_a_loop_means_what_it_means_without_compression(tmp_path: Path, kind: str, count: int) -> None:
    found = run_ranks(_programs, 2, tmp_path, kind, list(range(count)), timeout=200, process_group=None)
    assert found == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "part"), SLOW, ids=str)
def test_fresh_loops_mean_what_they_mean_without_compression(tmp_path: Path, kind: str, part: int) -> None:
    """Half of the seeds are new in each run."""
    seeds = [*range(100 + 10 * part, 110 + 10 * part), *(random.randrange(10**6, 10**9) for _ in range(10))]
    print(f"seeds of {kind}: {seeds}")
    found = run_ranks(_programs, 2, tmp_path, kind, seeds, timeout=280, process_group=None)
    assert found == [[], []]
