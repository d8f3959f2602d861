"""Training loops whose optimizer steps on something else than the last gradient, or at other times: without compression
they train the same to the bit, and compressed nearly as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import TrainerCallback

from lowbit_strategy.accelerate import LowBitPlugin
from lowbit_strategy.custom_loop import compress
from testing.processes.scenarios import Facts, scenarios
from testing.training import hf_trainer
from testing.training.comparing import checksum, fingerprint, full
from testing.training.plain import COMPRESSORS, batch, wrap
from testing.training.regression import OUTPUTS, mlp

METHODS = (None, "dense", "loco")


class Run(NamedTuple):
    """The bits that training ended with, and its losses."""

    print: int
    losses: list[float]


def finished(tensors: Iterable[Tensor], losses: list[float]) -> Run:
    return Run(checksum([full(each) for each in tensors]), losses)


def loss_of(model: nn.Module, step: int) -> Tensor:
    x = batch(step)
    return F.mse_loss(model(x), x[:, :OUTPUTS])


class Loop:
    """A model and its optimizer. `method`: of compression, or None."""

    def __init__(self, kind: str, method: str | None, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.net = mlp()
        self.model = wrap(kind, self.net)
        self.optimizer = make(self.net.parameters())
        if method is not None:
            compress(self.model, self.optimizer, COMPRESSORS.get(method, method))


def sharpness_aware(kind: str, method: str | None) -> Run:
    """Weights climb along the first gradient, which is cleared, and are back before the second moves them."""
    loop = Loop(kind, method, lambda params: torch.optim.SGD(params, lr=0.2, momentum=0.9))
    losses = []
    for step in range(12):
        loss = loss_of(loop.model, step)
        loss.backward()
        climbs = [0.05 * param.grad for param in loop.net.parameters() if param.grad is not None]
        loop.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_add_(list(loop.net.parameters()), climbs)
        loss_of(loop.model, step).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(loop.net.parameters()), climbs)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        losses.append(loss.item())
    return finished(loop.net.parameters(), losses)


def put_in(params: list[nn.Parameter], values: list[Tensor]) -> None:
    for param, value in zip(params, values, strict=True):
        param.copy_(value)


def averaged(kind: str, method: str | None) -> Run:
    """A moving average of weights, which takes their place for validation; under DDP also torch's, which is a copy."""
    loop = Loop(kind, method, lambda params: torch.optim.AdamW(params, lr=1e-2))
    params = list(loop.net.parameters())
    means, losses = [param.detach().clone() for param in params], []
    copy = AveragedModel(loop.net, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if kind == "ddp" else None
    for step in range(12):
        loss = loss_of(loop.model, step)
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        losses.append(loss.item())
        with torch.no_grad():
            torch._foreach_lerp_(means, [param.detach() for param in params], 0.1)
            if step % 4 == 3:
                trained = [param.detach().clone() for param in params]
                put_in(params, means)
                loop.net.eval()
                losses.append(loss_of(loop.model, step).item())
                loop.net.train()
                put_in(params, trained)
        if copy is not None:
            copy.update_parameters(loop.net)
    return finished([*params, *means, *([] if copy is None else copy.module.parameters())], losses)


def adversarial(kind: str, method: str | None) -> Run:
    """A generator and its critic, each a model with a session; the generator's pass leaves the critic gradients."""
    torch.manual_seed(0)
    nets = [mlp(), nn.Sequential(nn.Linear(OUTPUTS, 64), nn.Tanh(), nn.Linear(64, 1))]
    generator, critic = (wrap(kind, net) for net in nets)
    optimizers = [torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.5, 0.9)) for net in nets]
    for model, optimizer in zip((generator, critic), optimizers, strict=True) if method is not None else ():
        compress(model, optimizer, COMPRESSORS.get(method or "", method))
    losses = []
    for step in range(12):
        noise, real = batch(step), 1 + 0.3 * batch(50 + step)[:, :OUTPUTS]
        optimizers[1].zero_grad()
        judged = critic(torch.cat([real, generator(noise).detach()]))
        loss = F.softplus(-judged[: len(real)]).mean() + F.softplus(judged[len(real) :]).mean()
        loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        F.softplus(-critic(generator(noise))).mean().backward()
        optimizers[0].step()
        losses.append(loss.item())
    return finished((param for net in nets for param in net.parameters()), losses)


def closures(kind: str, method: str | None) -> Run:
    """LBFGS calls backward several times in a step."""
    loop = Loop(kind, method, lambda params: torch.optim.LBFGS(params, lr=0.5, max_iter=3, history_size=5))

    def closure() -> Tensor:
        loop.optimizer.zero_grad()
        loss = loss_of(loop.model, 0)
        loss.backward()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        return shown / dist.get_world_size()

    losses = [float(loop.optimizer.step(closure)) for _ in range(5)]
    return finished(loop.net.parameters(), losses)


LOOPS = {each.__name__: each for each in (sharpness_aware, averaged, adversarial, closures)}


def trained(folder: Path, loop: str, kind: str) -> Facts:
    return {str(method): LOOPS[loop](kind, method) for method in METHODS}


def check(facts: list[Facts], *, tolerance: float) -> None:
    for rank in facts:
        stock, dense, loco = rank["None"], rank["dense"], rank["loco"]
        assert dense == stock
        assert loco.print == facts[0]["loco"].print != stock.print
        gained = abs(stock.losses[0] - stock.losses[-1])
        assert abs(loco.losses[-1] - stock.losses[-1]) < tolerance * gained


@scenarios(
    trained,
    loop=tuple(LOOPS),
    kind=("ddp", "fsdp"),
    slow=lambda loop, kind, **_: (
        (loop, kind)
        not in (("sharpness_aware", "fsdp"), ("averaged", "ddp"), ("adversarial", "fsdp"), ("closures", "ddp"))
    ),
)
def test_other_loops_train_as_without_compression(facts: list[Facts]) -> None:
    check(facts, tolerance=0.1)


class SpikesAreCleared(TrainerCallback):
    """Clears gradients that are too large before the optimizer steps, as callbacks of the Trainer do."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.skipped: list[int] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        norm = torch.nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None])
        self.norms.append(float(norm))
        if self.norms[-1] > 100:
            self.skipped.append(state.global_step)
            model.zero_grad()


def cleared_by_the_trainer(folder: Path) -> Facts:
    found = {}
    for name, compressor in (("stock", None), ("dense", "dense"), ("loco", "loco")):
        callback = SpikesAreCleared()
        plugin = None if compressor is None else LowBitPlugin(compressor)
        made = hf_trainer.trainer(folder, "ddp", plugin, max_grad_norm=0)
        made.add_callback(callback)
        compute = made.compute_loss

        def spiked(*args: Any, compute: Any = compute, made: Any = made, **kwargs: Any) -> Any:
            factor = 1e4 if made.state.global_step == 3 and dist.get_rank() == 1 else 1.0
            return factor * compute(*args, **kwargs)

        made.compute_loss = spiked
        made.train()
        found[name] = callback.skipped, fingerprint(made.model)
    return found


@scenarios(cleared_by_the_trainer)
def test_a_spike_that_a_callback_of_the_trainer_clears_is_skipped_once(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["stock"][0] == rank["loco"][0] == [3]
        assert rank["dense"] == rank["stock"]
        assert rank["loco"][1] == facts[0]["loco"][1]
