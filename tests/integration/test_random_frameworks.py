"""One random loop, told to PyTorch, Fabric, Accelerate and Lightning: the same weights to the bit, on all ranks.

Optimizers take turns, gradients are thrown away, micro-batches are not synchronized, a rank has an empty batch.
Validations and checkpoints come in between and do not change a bit.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lowbit_strategy import PRESETS, DiLoCo, LocalSGD, LoCo, StreamingDiLoCo, TopK
from lowbit_strategy.accelerate import LowBitAccelerator, LowBitPlugin, binding_of
from lowbit_strategy.custom_loop import compress
from lowbit_strategy.fabric import LowBitDDPStrategy as FabricDDP
from lowbit_strategy.fabric import LowBitFSDPStrategy as FabricFSDP
from lowbit_strategy.lightning import LowBitDDPStrategy, LowBitFSDPStrategy
from testing.processes.ranks import join_group, run_ranks
from testing.training.accelerated import fresh_state, fsdp_plugin
from testing.training.comparing import full
from testing.training.fabric import launch
from testing.training.optimizers import Lookahead
from testing.training.regression import trainer

WIDTH, LENGTH = 32, 9
PARTS = ("first", "second")
KINDS = ("ddp", "fsdp", "local")
COMPRESSORS = (LoCo(block_size=32), LoCo(bits=2, block_size=32), TopK(density=0.1), PRESETS["powersgd"])
RULES = (DiLoCo(every=3), LocalSGD(every=2), StreamingDiLoCo(every=4, fragments=2, delay=1))
DDP_OPTIONS: dict[str, Any] = {"bucket_cap_mb": 1, "find_unused_parameters": True}
MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "lookahead": lambda params: Lookahead(torch.optim.AdamW(params, lr=1e-3)),
}


class Two(nn.Module):
    """Two networks, the second of which judges what the first makes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleDict(  # under the name that it has in a LightningModule: names are seeds
            {name: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for name in PARTS}
        )

    def forward(self, x: Tensor, which: str) -> Tensor:
        made: Tensor = self.net["second"](x if which == "second" else self.net["first"](x))
        return made


class Loop:
    """The loop of one seed; subclasses tell it to a framework.

    Args:
        glances: Validate and save in between.
    """

    def __init__(self, kind: str, seed: int, folder: Path, *, glances: bool = False) -> None:
        self.choice = random.Random(seed)
        self.compressor = COMPRESSORS[seed % len(COMPRESSORS)]
        self.outer = self.choice.choice(RULES) if kind == "local" else None
        torch.manual_seed(0)
        self.net, self.kind, self.folder, self.glances = Two(), kind, folder, glances
        self.model: Any = None
        kinds = [name for name in MAKE if kind != "fsdp" or name != "lookahead"]  # it keeps copies of unsharded weights
        self.names: list[str] = [self.choice.choice(kinds) for _ in PARTS]
        self.optimizers: list[Any] = []
        self.generator = torch.Generator().manual_seed(dist.get_rank())
        self.losses: list[float] = []
        self.at = itertools.count()

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        return [MAKE[name](self.net.net[part].parameters()) for name, part in zip(self.names, PARTS, strict=True)]

    # -- what a framework does --------------------------------------------------------------------------------------

    def forward(self, x: Tensor, which: str) -> Tensor:
        made: Tensor = self.model(x, which)
        return made

    def backward(self, loss: Tensor) -> None:
        raise NotImplementedError

    def no_sync(self) -> Any:
        raise NotImplementedError

    def save(self) -> None:
        raise NotImplementedError

    def run(self) -> list[float]:
        raise NotImplementedError

    # -- what the loop does -----------------------------------------------------------------------------------------

    def compute(self, which: str) -> None:
        empty = self.choice.random() < 0.1 and dist.get_rank() == dist.get_world_size() - 1
        x = torch.randn(0 if empty else 4, WIDTH, generator=self.generator)
        loss = (self.forward(x, which) - x.roll(1, 1)).square().sum() / 128
        self.losses.append(loss.item())
        self.backward(loss)

    def step(self, *which: int) -> None:
        for at in which:
            self.optimizers[at].step()

    def clear(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def together(self) -> None:
        self.clear()
        self.compute("both")
        self.step(0, 1)

    def first_alone(self) -> None:
        """The second's gradients are thrown away."""
        self.clear()
        self.compute("both")
        self.step(0)
        self.clear()

    def second_alone(self) -> None:
        self.clear()
        self.compute("second" if self.kind != "fsdp" else "both")
        self.step(1)
        self.clear()

    def in_turns(self) -> None:
        self.first_alone()
        self.second_alone()

    def thrown_away(self) -> None:
        self.clear()  # Lightning clears gradients before it validates
        self.compute("both")
        self.clear()

    def added(self) -> None:
        """A micro-batch is not synchronized."""
        self.clear()
        with self.no_sync():
            self.compute("both")
        self.compute("both")
        self.step(0, 1)

    def act(self) -> None:
        """The next of `LENGTH` actions."""
        actions = [self.together, self.first_alone, self.second_alone, self.thrown_away]
        # Of local steps that one training step of Lightning takes in turns, only the module knows the end.
        actions += [] if self.kind == "local" else [self.added, self.in_turns]
        at = next(self.at)
        (self.together if at in (0, LENGTH - 1) else self.choice.choice(actions))()

    @torch.no_grad()
    def glance(self) -> None:
        if self.glances:
            self.model.eval()
            self.forward(torch.ones(4, WIDTH), "both")
            self.model.train()
            self.save()

    def result(self) -> list[float]:
        return [*self.losses, *(full(param).double().sum().item() for param in self.net.parameters())]


class Own(Loop):
    """Plain PyTorch, attached in one call."""

    def run(self) -> list[float]:
        if self.kind == "fsdp":
            self.model = fully_shard(self.net)
        else:
            self.model = DistributedDataParallel(self.net, **DDP_OPTIONS)
        self.optimizers = self.make_optimizers()
        self.session = compress(self.model, self.optimizers, self.compressor, outer=self.outer)
        for _ in range(LENGTH):
            self.act()
            with self.session.shared_weights(validates=False):
                self.glance()
        self.session.finish()
        self.session.close()
        return self.result()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    @contextlib.contextmanager
    def no_sync(self) -> Any:
        if self.kind != "fsdp":
            with self.model.no_sync():
                yield
            return
        self.model.set_requires_gradient_sync(False)
        yield
        self.model.set_requires_gradient_sync(True)

    def save(self) -> None:
        with self.session.save(self.folder / "own.ckpt"):
            pass


class WithFabric(Loop):
    def run(self) -> list[float]:
        options: dict[str, Any] = {"outer": self.outer}
        if self.kind == "fsdp":
            self.fabric: Any = launch(FabricFSDP(self.compressor, min_shard_numel=10**6, **options))
        else:
            self.fabric = launch(FabricDDP(self.compressor, **DDP_OPTIONS, **options))
        self.model, *self.optimizers = self.fabric.setup(self.net, *self.make_optimizers())
        for _ in range(LENGTH):
            self.act()
            with self.fabric.strategy.sessions[0].shared_weights(validates=False):
                self.glance()
        for session in self.fabric.strategy.sessions:
            session.finish()
            session.close()
        return self.result()

    def backward(self, loss: Tensor) -> None:
        self.fabric.backward(loss)

    def no_sync(self) -> Any:
        return self.fabric.no_backward_sync(self.model)

    def save(self) -> None:
        self.fabric.save(self.folder / "fabric.ckpt", {"model": self.model})


class WithAccelerate(Loop):
    def run(self) -> list[float]:
        fresh_state()
        plugin = LowBitPlugin(self.compressor, outer=self.outer)
        if self.kind == "fsdp":
            self.accelerator: Any = LowBitAccelerator(lowbit_plugin=plugin, fsdp_plugin=fsdp_plugin(by_block=False))
        else:
            self.accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(**DDP_OPTIONS)])
            plugin.attach(self.accelerator)
        self.model, *self.optimizers = self.accelerator.prepare(self.net, *self.make_optimizers())
        self.net = self.accelerator.unwrap_model(self.model)
        for _ in range(LENGTH):
            self.act()
            self.glance()
        binding = binding_of(self.accelerator)
        assert binding is not None
        binding.finish()  # end_training would end the process group too
        found = self.result()
        self.accelerator.free_memory()
        return found

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def no_sync(self) -> Any:
        return self.accelerator.no_sync(self.model)

    def save(self) -> None:
        if self.kind == "fsdp":  # save_state takes one optimizer of each FSDP model
            self.accelerator.get_state_dict(self.model)
        else:
            self.accelerator.save_state(str(self.folder / "accelerate"))


class Module(L.LightningModule):
    """Each of its training steps is one action of the loop."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.net, self.loop, self.automatic_optimization = loop.net.net, [loop], False

    def configure_optimizers(self) -> Any:
        return self.loop[0].make_optimizers()

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.loop[0].act()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.loop[0].net(torch.ones(4, WIDTH), "both")

    def on_train_batch_end(self, *_: Any) -> None:
        if self.loop[0].glances:
            self.trainer.save_checkpoint(self.loop[0].folder / "lightning.ckpt")


class WithLightning(Loop):
    def run(self) -> list[float]:
        options: dict[str, Any] = {"outer": self.outer}
        if self.kind == "fsdp":
            strategy: Any = LowBitFSDPStrategy(self.compressor, min_shard_numel=10**6, **options)
        else:
            strategy = LowBitDDPStrategy(self.compressor, **DDP_OPTIONS, **options)
        self.model = Module(self)
        batches: Any = DataLoader(torch.zeros(2 * LENGTH, 1))  # type: ignore[arg-type]
        checks: dict[str, Any] = (
            {"val_check_interval": 2, "limit_val_batches": 1} if self.glances else {"limit_val_batches": 0}
        )
        made = trainer(strategy, max_steps=-1, max_epochs=1, num_sanity_val_steps=0, **checks)
        made.fit(self.model, batches, batches)
        return self.result()

    def forward(self, x: Tensor, which: str) -> Tensor:
        made: Tensor = self.net(x, which)
        return made

    def step(self, *which: int) -> None:
        self.optimizers = self.model.optimizers()
        super().step(*which)

    def clear(self) -> None:
        self.optimizers = self.model.optimizers()
        super().clear()

    def backward(self, loss: Tensor) -> None:
        self.model.manual_backward(loss)

    def no_sync(self) -> Any:
        return self.model.trainer.strategy.block_backward_sync()


FRAMES: tuple[type[Loop], ...] = (Own, WithFabric, WithAccelerate, WithLightning)


def _loops(rank: int, world_size: int, folder: Path, kind: str, seeds: list[int]) -> Any:
    """What differs: seed, framework and comparison."""
    join_group(rank, world_size, folder, 60)
    wrong: list[Any] = []
    for seed in seeds:
        expected: list[float] = []
        for frame in FRAMES:
            gc.collect()  # groups of gloo keep their threads as long as anything refers to them
            for glances in (False, True):
                found = frame(kind, seed, folder, glances=glances).run()
                expected = expected or found
                wrong += [(seed, frame.__name__, "glances" if glances else "run")] if found != expected else []
        alike: list[Any] = [None] * world_size
        dist.all_gather_object(alike, expected[-8:])
        wrong += [(seed, "ranks")] if any(each != alike[0] for each in alike) else []
    return wrong


@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp", "local"])
def test_frameworks_train_alike(tmp_path: Path, kind: str) -> None:
    found = run_ranks(_loops, 2, tmp_path, kind, [KINDS.index(kind)], timeout=200, process_group=None)
    assert found == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_frameworks_train_fresh_loops_alike(tmp_path: Path, kind: str) -> None:
    """Half of the seeds are new in each run."""
    seeds = [*range(3, 11), *(random.randrange(10**6, 10**9) for _ in range(8))]
    print(f"seeds of {kind}: {seeds}")
    found = run_ranks(_loops, 2, tmp_path, kind, seeds, timeout=280, process_group=None)
    assert found == [[], []]
