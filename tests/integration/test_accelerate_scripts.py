"""Accelerate scripts as users write them: compression off (`Dense`) trains as Accelerate's own DDP, in every layout.

With compression what only looks (validating, averaging weights aside, saving, going back) changes not one bit.

Local steps that take the mean of all weights after every step of plain SGD are synchronous training too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lowbit_strategy import Dense
from lowbit_strategy.accelerate import LowBitPlugin, binding_of
from testing.processes.scenarios import Facts, scenarios
from testing.training import accelerated
from testing.training.comparing import full_parameters
from testing.training.regression import dataset, mlp
from testing.training.script_layouts import LOCO, OFF, ON, STOCK, Layout, check_close, distances

# On four ranks.
HSDP_OFF = {"hsdp": Layout("fsdp", {"compressor": Dense(), "shard_size": 2})}
HSDP_ON = {"hsdp": Layout("fsdp", {"compressor": LOCO, "shard_size": 2})}


class Run:
    """A script: its model, optimizer and batches, prepared."""

    def __init__(self, layout: Layout, net: nn.Module | None = None, *, accumulate: int = 1, lr: float = 0.05) -> None:
        wraps = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Linear"]}
        if net is not None:
            wraps = {"auto_wrap_policy": "no_wrap"}
        torch.manual_seed(1)
        self.net = mlp() if net is None else net
        plugin = None if layout.options is None else LowBitPlugin(**layout.options)
        given = {}
        if layout.kind == "fsdp":
            given["fsdp_plugin"] = FullyShardedDataParallelPlugin(
                fsdp_version=2, cpu_ram_efficient_loading=False, **wraps
            )
        self.accelerator = accelerated.make(layout.kind, plugin, accumulate=accumulate, **given)
        optimizer = torch.optim.SGD([p for p in self.net.parameters() if p.requires_grad], lr)
        batches = DataLoader(dataset(), batch_size=4)
        self.model, self.optimizer, self.batches = self.accelerator.prepare(self.net, optimizer, batches)
        self.ahead: Iterator[Any] = iter(())

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.model(x), y)

    def next(self) -> Any:
        batch = next(self.ahead, None)
        if batch is None:
            self.ahead = iter(self.batches)
            batch = next(self.ahead)
        return batch

    def train(self, steps: int) -> None:
        for _ in range(steps):
            batch = self.next()
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.loss(batch))
                self.optimizer.step()
                self.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Local steps: of what this rank has."""
        self.model.eval()
        found = self.loss(dataset()[:16]).item()
        self.model.train()
        return found

    def finish(self) -> dict[str, Tensor]:
        if (binding := binding_of(self.accelerator)) is not None:
            binding.finish()
        return full_parameters(self.accelerator.unwrap_model(self.model))


@contextlib.contextmanager
def averaged(run: Run, means: list[Tensor]) -> Iterator[None]:
    """Averaged weights in the place of the model's, past the version counters."""
    params = list(run.model.parameters())
    own = [param.data.clone() for param in params]
    for param, mean in zip(params, means, strict=True):
        param.data.copy_(mean)
    yield
    for param, value in zip(params, own, strict=True):
        param.data.copy_(value)


def averages(layout: Layout, folder: Path, *, looks: bool = True) -> Any:
    run = Run(layout)
    means = [param.data.clone() for param in run.model.parameters()]
    seen = []
    for _ in range(8):
        run.train(1)
        if looks:
            for mean, param in zip(means, run.model.parameters(), strict=True):
                mean.lerp_(param.data, 0.1)
            with averaged(run, means):
                seen.append(run.evaluate())
    assert len(set(seen)) == len(seen)  # what was evaluated did change
    compresses = layout.options is not None and layout.options["compressor"] is LOCO
    return run.finish() | {"seen": torch.tensor([] if compresses else seen)}


def validates(layout: Layout, folder: Path, *, looks: bool = True) -> Any:
    """Within windows of accumulation too."""
    run = Run(layout, accumulate=3)
    for _ in range(12):
        run.train(1)
        if looks:
            run.evaluate()
    return run.finish()


def saves(layout: Layout, folder: Path, *, looks: bool = True) -> Any:
    """Two checkpoints right after one another, and weights written by a thread while training goes on."""
    run = Run(layout)
    for step in range(8):
        run.train(1)
        if looks and step % 3 == 0:
            for name in ("one", "two"):
                run.accelerator.save_state(str(folder / name))
            values = run.accelerator.get_state_dict(run.model)
            thread = threading.Thread(target=torch.save, args=(values, folder / f"{dist.get_rank()}.pt"))
            thread.start()
            run.train(1)
            thread.join()
        elif step % 3 == 0:
            run.train(1)
    return run.finish()


def resumed(layout: Layout, folder: Path, *, looks: bool = True) -> Any:
    """Goes on from a checkpoint that another followed at once, in the same process."""
    run = Run(layout)
    run.train(5)
    if looks:
        run.accelerator.save_state(str(folder / "one"))
        run.accelerator.save_state(str(folder / "two"))
        run.train(3)
        run.accelerator.load_state(str(folder / "one"))
        run.ahead = iter(run.batches)
        for _ in range(5):
            run.next()
    run.train(6)
    return run.finish()


def other_weights(layout: Layout, folder: Path) -> Any:
    run = Run(layout)
    run.train(4)
    with torch.no_grad():
        for param in run.model.parameters():
            param.mul_(0.5)
    run.train(3)
    for param in run.model.parameters():
        param.data.mul_(1.5)
    run.train(4)
    return run.finish()


def unfinished_window(layout: Layout, folder: Path) -> Any:
    """12 batches by windows of 5: Accelerate steps at the end of the data."""
    run = Run(layout, accumulate=5)
    run.train(24)
    return run.finish()


def lora(layout: Layout, folder: Path) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=8, target_modules=["0", "2"], modules_to_save=["4"])
    run = Run(layout, get_peft_model(mlp(), config))
    run.train(8)
    return run.finish()


def goes_on_after_an_error(layout: Layout, folder: Path) -> Any:
    """In a forward pass, in the middle of a window and of an epoch."""
    run = Run(layout, accumulate=2)
    run.train(3)

    def fails(*unused: Any) -> None:
        raise ArithmeticError("an error of the user's own")

    hook = run.net.register_forward_hook(fails)
    with pytest.raises(ArithmeticError):
        run.train(1)
    hook.remove()
    run.train(6)
    return run.finish()


def a_second_run(layout: Layout, folder: Path) -> Any:
    """Of the same weights, with an accelerator of its own."""
    first = Run(layout)
    first.train(4)
    values = first.finish()
    first.accelerator.free_memory(first.model, first.optimizer)
    net = mlp()
    net.load_state_dict({name: value.detach().clone() for name, value in values.items()})
    second = Run(layout, net)
    second.train(4)
    return second.finish()


def clipped(layout: Layout, folder: Path) -> Any:
    run = Run(layout)
    for _ in range(6):
        run.accelerator.backward(run.loss(run.next()))
        norm = run.accelerator.clip_grad_norm_(run.model.parameters(), 0.2)
        run.optimizer.step()
        run.optimizer.zero_grad()
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return run.finish() | {"norm": norm}


LOOKS: dict[str, Callable[..., Any]] = {each.__name__: each for each in (averages, validates, saves, resumed)}
SCRIPTS: dict[str, Callable[..., Any]] = LOOKS | {
    each.__name__: each
    for each in (other_weights, unfinished_window, lora, goes_on_after_an_error, a_second_run, clipped)
}
LOCAL = ("clipped",)  # each rank's own norm


def compared(folder: Path, script: str) -> Facts:
    """How far each layout's weights are from those of Accelerate's own DDP, at most."""
    runs = {}
    for name, layout in {"stock": STOCK, **(OFF if dist.get_world_size() == 2 else HSDP_OFF)}.items():
        own = folder / name
        own.mkdir(exist_ok=True)
        runs[name] = SCRIPTS[script](layout, own)
    reference = runs.pop("stock")
    judged = {name: run for name, run in runs.items() if name != "local" or script not in LOCAL}
    return distances(judged, reference)


@pytest.mark.slow
@scenarios(compared, script=tuple(SCRIPTS))
def test_as_without_this_package(facts: list[Facts]) -> None:
    check_close(facts)


@pytest.mark.slow
@scenarios(compared, world_size=4, script=tuple(SCRIPTS))
def test_sharded_in_groups_as_without_this_package(facts: list[Facts]) -> None:
    check_close(facts)


def looked_or_not(folder: Path, script: str, layout: str) -> Facts:
    chosen = {**ON, **HSDP_ON}[layout]
    with_it, without = (LOOKS[script](chosen, folder, looks=looks) for looks in (True, False))
    return {key: torch.equal(with_it[key], value) for key, value in without.items()}


@pytest.mark.slow
@scenarios(looked_or_not, script=tuple(LOOKS), layout=tuple(ON))
def test_what_only_looks_changes_nothing(facts: list[Facts]) -> None:
    assert all(all(rank.values()) for rank in facts), facts


@pytest.mark.slow
@scenarios(looked_or_not, world_size=4, script=tuple(LOOKS), layout=tuple(HSDP_ON))
def test_what_only_looks_changes_nothing_in_groups(facts: list[Facts]) -> None:
    assert all(all(rank.values()) for rank in facts), facts
