"""Scripts as users write them: compression off (`Dense`) trains as Lightning's own DDP does, in every layout.

Local steps that take the mean of all weights after every step of plain SGD are synchronous training too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EarlyStopping, GradientAccumulationScheduler
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import grad_norm
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from lowbit_strategy import Dense, LocalSGD
from lowbit_strategy.lightning import LowBitDDPStrategy, LowBitFSDPStrategy
from testing.processes.scenarios import Facts, scenarios
from testing.training.comparing import full, full_parameters
from testing.training.regression import MIN_SHARD_NUMEL, Regression, loader, mlp, trainer

Make = Callable[..., Any]
TOLERANCE = 1e-6


def ddp(**options: Any) -> Any:
    return LowBitDDPStrategy(Dense(), bucket_cap_mb=0.01, **options)


def local(**options: Any) -> Any:
    return LowBitDDPStrategy(Dense(), outer=LocalSGD(every=1), **options)


def fsdp(**options: Any) -> Any:
    return LowBitFSDPStrategy(Dense(), min_shard_numel=MIN_SHARD_NUMEL, weights="exact")


def hsdp(**options: Any) -> Any:
    return LowBitFSDPStrategy(Dense(), min_shard_numel=MIN_SHARD_NUMEL, shard_size=1)


def stock(**options: Any) -> Any:
    return "ddp_find_unused_parameters_true" if options else "ddp"


LAYOUTS: dict[str, Make] = {"ddp": ddp, "local": local, "fsdp": fsdp, "hsdp": hsdp}


class Net(Regression):
    """By plain SGD."""

    def __init__(self, net: nn.Module | None = None, lr: float = 0.05) -> None:
        torch.manual_seed(1)
        super().__init__(net, optimizer="plain", lr=lr)


def fit(strategy: Any, model: Any, **options: Any) -> Any:
    made = trainer(strategy, **({"max_steps": 8, "num_sanity_val_steps": 0} | options))
    made.fit(model, loader(), loader(16) if "val_check_interval" in options else None)
    return made


def lora(make: Make, folder: Path) -> nn.Module:
    torch.manual_seed(0)
    config = LoraConfig(r=8, target_modules=["0", "2"], modules_to_save=["4"], lora_dropout=0.3)
    model = Net(get_peft_model(mlp(), config))
    torch.manual_seed(dist.get_rank())
    fit(make(), model)
    return model


class Averages(Callback):
    """Validates averaged weights, past the version counters."""

    def __init__(self) -> None:
        self.means: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *unused: Any) -> None:
        if not self.means:
            self.means = [param.data.clone() for param in module.parameters()]
        for mean, param in zip(self.means, module.parameters(), strict=True):
            mean.lerp_(param.data, 0.1)

    def on_validation_epoch_start(self, trainer: Any, module: Any) -> None:
        self.own = [param.data.clone() for param in module.parameters()]
        for mean, param in zip(self.means, module.parameters(), strict=True):
            param.data.copy_(mean)  # of a DTensor ``.data = mean`` changes nothing

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        for own, param in zip(self.own, module.parameters(), strict=True):
            param.data.copy_(own)


def averages(make: Make, folder: Path) -> nn.Module:
    model = Net()
    fit(make(), model, val_check_interval=2, callbacks=[Averages()])
    return model


class Gan(Regression):
    """One forward pass of the generator, which its critic's step comes before; and the losses one after the other."""

    automatic_optimization = False

    def __init__(self, *, one_pass: bool) -> None:
        torch.manual_seed(1)
        super().__init__()
        del self.net
        self.generator, self.critic, self.one_pass = mlp(), nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 1)), one_pass

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        of_generator, of_critic = self.optimizers()
        made = self.generator(x)
        self._step(of_critic, F.softplus(-self.critic(y)).mean() + F.softplus(self.critic(made.detach())).mean())
        if not self.one_pass:
            made = self.generator(x)
        self._step(of_generator, F.softplus(-self.critic(made)).mean() + F.mse_loss(made, y))

    def _step(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), 0.05) for part in (self.generator, self.critic)]


def gan(make: Make, folder: Path) -> nn.Module:
    model = Gan(one_pass=False)
    fit(make(find_unused_parameters=True), model, max_steps=12)
    return model


def gan_in_one_pass(make: Make, folder: Path) -> nn.Module:
    model = Gan(one_pass=True)
    fit(make(find_unused_parameters=True), model, max_steps=12)
    return model


class Raises(Net):
    armed = True
    raises_at = 3  # batches

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if len(self.losses) > self.raises_at and self.armed:
            self.armed = False
            raise ArithmeticError("an error of the user's own")
        return loss


def again_after_an_error(make: Make, folder: Path) -> nn.Module:
    model = Raises()
    with pytest.raises(ArithmeticError):
        fit(make(), model)
    assert all(isinstance(param, DTensor) for param in model.parameters()) == (make in (fsdp, hsdp))
    fit(make(), model)
    return model


def again_after_an_error_within_a_window(make: Make, folder: Path) -> nn.Module:
    """What the window has accumulated until then is of no later step."""
    model = Raises()
    model.raises_at = 7
    for error in (ArithmeticError, None):
        with contextlib.nullcontext() if error is None else pytest.raises(error):
            fit(make(), model, accumulate_grad_batches=2)
    return model


@contextlib.contextmanager
def inner_pass(module: nn.Module) -> Iterator[None]:
    """As docs/troubleshooting.md has it."""
    blocks = [each for each in module.modules() if isinstance(each, FSDPModule)]
    for block in blocks:
        block.set_reshard_after_backward(False, recurse=False)
        block.set_requires_gradient_sync(False, recurse=False)
    yield
    for block in blocks:
        block.set_reshard_after_backward(True, recurse=False)
        block.set_requires_gradient_sync(True, recurse=False)


class Penalty(Net):
    """FSDP2 frees weights after a backward pass, and the second one needs what the first has saved."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch[0].clone().requires_grad_(), batch[1]
        with inner_pass(self):
            out = self(x)
            slope = torch.autograd.grad(out.square().sum(), x, create_graph=True)[0]
        return F.mse_loss(out, y) + 0.1 * slope.square().mean()


def gradient_penalty(make: Make, folder: Path) -> nn.Module:
    model = Penalty()
    fit(make(), model)
    return model


class Norms(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        params = [param for param in self.parameters() if param.grad is not None]
        norm = torch.nn.utils.get_total_norm([param.grad for param in params])
        self.seen = {"norm": full(norm)}
        if isinstance(params[0], DTensor):  # under Lightning's own ModelParallelStrategy too
            with pytest.raises(RuntimeError, match="not allocated"):
                grad_norm(self, 2)
        else:
            torch.testing.assert_close(grad_norm(self, 2)["grad_2.0_norm_total"], norm)


def norms_and_clipping(make: Make, folder: Path) -> nn.Module:
    model = Norms()
    fit(make(), model, gradient_clip_val=0.1)
    return model


def other_weights_between_fits(make: Make, folder: Path) -> nn.Module:
    model = Net()
    made = fit(make(), model, max_steps=4)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    made.fit_loop.epoch_loop.max_steps = 8
    made.fit(model, loader())
    return model


def learning_rate_finder(make: Make, folder: Path) -> nn.Module:
    model = Net()
    made = trainer(make(), max_steps=-1, max_epochs=1, default_root_dir=folder)
    Tuner(made).lr_find(model, loader(), num_training=10, max_lr=0.1)
    model.lr = 0.05
    made.fit(model, loader())
    return model


def accumulation_in_stages(make: Make, folder: Path) -> nn.Module:
    model = Net()
    stages = GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})
    fit(make(), model, max_steps=-1, max_epochs=3, limit_train_batches=5, callbacks=[stages])
    return model


def early_stopping(make: Make, folder: Path) -> nn.Module:
    model = Net(lr=0.3)
    made = fit(make(), model, max_steps=40, val_check_interval=3, callbacks=[EarlyStopping("val_loss", patience=1)])
    made.validate(model, loader(16), verbose=False)
    made.test(model, loader(16), verbose=False)
    return model


class TwoPasses(Net):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.manual_backward(0.5 * self.loss(batch))
        optimizer.step()


class Freezes(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(not 3 <= self.global_step < 6)


def frozen_in_mid_run(make: Make, folder: Path) -> nn.Module:
    model = Freezes()
    fit(make(find_unused_parameters=True), model, max_steps=10)
    return model


def two_passes_of_one_step(make: Make, folder: Path) -> nn.Module:
    model = TwoPasses()
    fit(make(), model, max_steps=5)
    return model


SCRIPTS = {
    script.__name__: script
    for script in (
        gan_in_one_pass,
        again_after_an_error,
        other_weights_between_fits,
        learning_rate_finder,
        lora,
        averages,
        gan,
        again_after_an_error_within_a_window,
        gradient_penalty,
        norms_and_clipping,
        accumulation_in_stages,
        early_stopping,
        frozen_in_mid_run,
        two_passes_of_one_step,
    )
}
QUICK = tuple(SCRIPTS)[:2]


def compared(folder: Path, script: str) -> Facts:
    """How far each layout's weights, and what a script has seen, are from those of Lightning's own DDP, at most."""
    runs = {}
    for name, make in {"stock": stock, **LAYOUTS}.items():
        own = folder / name
        own.mkdir(exist_ok=True)
        model = SCRIPTS[script](make, own)
        runs[name] = full_parameters(model) | getattr(model, "seen", {})
    reference = runs.pop("stock")
    return {
        name: max(float((run[key] - value).abs().max()) for key, value in reference.items())
        for name, run in runs.items()
    }


def too_far(script: str, facts: list[Facts]) -> list[Facts]:
    """The layouts that are further from stock than rounding. Under local steps the generator of a GAN learns from this
    rank's critic, which has stepped alone, where stock's ranks have stepped together; norms are of its own gradients.
    """
    local = {"gan": 1e-3, "gan_in_one_pass": 1e-3, "norms_and_clipping": math.inf}.get(script, TOLERANCE)
    return [
        {name: far for name, far in rank.items() if not far <= (local if name == "local" else TOLERANCE)}
        for rank in facts
    ]


@scenarios(compared, script=QUICK)
def test_as_without_this_package(facts: list[Facts], request: Any) -> None:
    assert too_far(request.node.callspec.id, facts) == [{}, {}]


@pytest.mark.slow
@scenarios(compared, script=tuple(SCRIPTS)[2:])
def test_more_scripts_as_without_this_package(facts: list[Facts], request: Any) -> None:
    assert too_far(request.node.callspec.id, facts) == [{}, {}]
