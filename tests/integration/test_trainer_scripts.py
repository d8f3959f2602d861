"""The HF Trainer as users drive it: compression off (`Dense`) trains as the Trainer's own DDP does, in every layout.

With compression what only looks (evaluating in the middle, averaging weights aside, saving, stopping early) changes not
one bit. Local steps that take the mean of all weights after every step of plain SGD are synchronous training too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments, set_seed

from lowbit_strategy.accelerate import LowBitPlugin, binding_of
from lowbit_strategy.transformers import attach
from testing.processes.scenarios import Facts, scenarios
from testing.training.accelerated import fresh_state
from testing.training.comparing import full_parameters
from testing.training.regression import dataset, mlp
from testing.training.script_layouts import OFF, ON, STOCK, Layout, check_close, distances


class Pairs(Dataset[Any]):
    def __init__(self, number: int) -> None:
        self.data = dataset(number)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        x, labels = self.data[at]
        return {"x": x, "labels": labels}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.fails_at: int | None = None
        self.passes = 0

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.passes += self.training
        if self.passes == self.fails_at:
            raise ArithmeticError("an error of the user's own")
        out = self.net(x)
        return {"loss": F.mse_loss(out, labels), "logits": out}


def make(
    layout: Layout, folder: Path, net: nn.Module | None = None, *, kind: type[Trainer] = Trainer, **options: Any
) -> Trainer:
    fresh_state()
    set_seed(1)
    if layout.kind == "fsdp":
        options |= {"fsdp": True, "fsdp_config": {"auto_wrap_policy": "NO_WRAP"}}
    defaults: dict[str, Any] = {
        "max_steps": 8,
        "optim": "sgd",
        "learning_rate": 0.05,
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 8,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "label_names": ["labels"],
        "train_sampling_strategy": "sequential",
    }
    args = TrainingArguments(str(folder), use_cpu=True, disable_tqdm=True, **(defaults | options))
    made = kind(Net() if net is None else net, args, train_dataset=Pairs(96), eval_dataset=Pairs(16))
    if layout.options is not None:
        attach(made, LowBitPlugin(**layout.options))
    return made


def weights_of(trained: Trainer) -> dict[str, Tensor]:
    if (binding := binding_of(trained.accelerator)) is not None:
        binding.finish()
    return full_parameters(trained.accelerator.unwrap_model(trained.model_wrapped))


class Averages(TrainerCallback):
    """Means of weights, which are evaluated in the place of the model's, past the version counters."""

    def __init__(self) -> None:
        self.means: list[Tensor] = []
        self.trainer: Trainer | None = None
        self.seen: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        params = list(self.trainer.model_wrapped.parameters())
        self.means = self.means or [param.data.clone() for param in params]
        for mean, param in zip(self.means, params, strict=True):
            mean.lerp_(param.data, 0.1)
        if isinstance(self.trainer, Swaps):
            self.trainer.means = self.means
            self.seen.append(self.trainer.evaluate()["eval_loss"])
        else:
            with swapped(params, self.means):
                self.seen.append(self.trainer.evaluate()["eval_loss"])


@contextlib.contextmanager
def swapped(params: list[Tensor], means: list[Tensor]) -> Iterator[None]:
    own = [param.data.clone() for param in params]
    for param, mean in zip(params, means, strict=True):
        param.data.copy_(mean)
    yield
    for param, value in zip(params, own, strict=True):
        param.data.copy_(value)


def averages(layout: Layout, folder: Path, *, looks: bool = True) -> Any:
    by_callback = layout.options is None or "outer" not in layout.options
    made, callback = make(layout, folder, kind=Trainer if by_callback else Swaps), Averages()
    if looks:
        callback.trainer = made
        made.add_callback(callback)
    made.train()
    assert len(set(callback.seen)) == len(callback.seen)
    return weights_of(made) | ({} if layout in ON.values() else {"seen": torch.tensor(callback.seen)})


class Swaps(Trainer):
    """Averaged weights are put in where the Trainer evaluates: local steps have put in those that all ranks share."""

    means: list[Tensor]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with swapped(list(self.model_wrapped.parameters()), self.means):
            return super().evaluation_loop(*args, **kwargs)


def evaluates(layout: Layout, folder: Path, *, looks: bool = True) -> Any:
    """In the middle of an epoch, and between two calls of ``train``."""
    given = {"eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True} if looks else {}
    made = make(layout, folder, gradient_accumulation_steps=2, **given)
    made.train()
    if looks:
        made.evaluate()
        made.predict(Pairs(8))
    made.train()
    return weights_of(made)


def saves(layout: Layout, folder: Path, *, looks: bool = True) -> Any:
    given = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2} if looks else {}
    made = make(layout, folder, **given)
    made.train()
    if looks:
        made.save_model(str(folder / "model"))
    return weights_of(made)


def stops_early(layout: Layout, folder: Path, *, looks: bool = True) -> Any:
    """The best checkpoint is loaded in the end."""
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False}
    made = make(layout, folder / str(looks), learning_rate=0.3, max_steps=24, **options)
    made.add_callback(EarlyStoppingCallback(early_stopping_patience=2))
    made.train()
    if looks:
        made.evaluate()
    return weights_of(made)


def trains_twice(layout: Layout, folder: Path) -> Any:
    """The same Trainer: another optimizer, the weights of the first."""
    made = make(layout, folder)
    made.train()
    made.train()
    return weights_of(made)


def other_weights(layout: Layout, folder: Path) -> Any:
    """Loaded between two calls of ``train``, and edited past the version counters."""
    made = make(layout, folder)
    made.train()
    model = made.accelerator.unwrap_model(made.model_wrapped)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    made.train()
    for param in model.parameters():
        param.data.mul_(1.5)
    made.train()
    return weights_of(made)


def another_trainer(layout: Layout, folder: Path) -> Any:
    """Of the same model, after one that has ended."""
    net = Net()
    set_seed(1)
    net = Net()
    first = make(layout, folder, net)
    first.train()
    values = {name: value.clone() for name, value in weights_of(first).items()}
    if layout.kind == "fsdp":  # a sharded model stays one: what users do is to load its weights
        net = Net()
        net.load_state_dict(values)
    second = make(layout, folder, net)
    second.train()
    return weights_of(second)


def unfinished_window(layout: Layout, folder: Path) -> Any:
    """12 batches by windows of 5: the Trainer steps at the end of an epoch."""
    made = make(layout, folder, gradient_accumulation_steps=5, max_steps=-1, num_train_epochs=2)
    made.train()
    return weights_of(made)


def lora(layout: Layout, folder: Path) -> Any:
    from peft import LoraConfig, get_peft_model

    set_seed(1)
    net = Net()
    net.net = get_peft_model(net.net, LoraConfig(r=8, target_modules=["0", "2"], modules_to_save=["4"]))
    made = make(layout, folder, net)
    made.train()
    return weights_of(made)


def goes_on_after_an_error(layout: Layout, folder: Path) -> Any:
    """In a forward pass, in the middle of a window."""
    set_seed(1)
    net = Net()
    net.fails_at = 6
    made = make(layout, folder, net, gradient_accumulation_steps=2)
    with pytest.raises(ArithmeticError):
        made.train()
    made.train()
    return weights_of(made)


LOOKS: dict[str, Callable[..., Any]] = {each.__name__: each for each in (averages, evaluates, saves, stops_early)}
SCRIPTS: dict[str, Callable[..., Any]] = LOOKS | {
    each.__name__: each
    for each in (trains_twice, other_weights, another_trainer, unfinished_window, lora, goes_on_after_an_error)
}


def compared(folder: Path, script: str) -> Facts:
    """How far each layout's weights are from those of the Trainer's own DDP, at most."""
    runs = {}
    for name, layout in {"stock": STOCK, **OFF}.items():
        own = folder / name
        own.mkdir(exist_ok=True)
        runs[name] = SCRIPTS[script](layout, own)
        dist.barrier()
    reference = runs.pop("stock")
    return distances(runs, reference)


@pytest.mark.slow
@scenarios(compared, script=tuple(SCRIPTS))
def test_as_without_this_package(facts: list[Facts]) -> None:
    check_close(facts)


def looked_or_not(folder: Path, script: str, layout: str) -> Facts:
    with_it, without = (LOOKS[script](ON[layout], folder, looks=looks) for looks in (True, False))
    return {key: torch.equal(with_it[key], value) for key, value in without.items()}


@pytest.mark.slow
@scenarios(looked_or_not, script=tuple(LOOKS), layout=tuple(ON))
def test_what_only_looks_changes_nothing(facts: list[Facts]) -> None:
    assert all(all(rank.values()) for rank in facts), facts
