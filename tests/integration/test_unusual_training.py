"""Coded weights in training loops that few scripts have: what is kept of weights never changes what is trained.

The reference keeps nothing, so that every gather sends what the owners have. A run that keeps codes or a replica is the
same to the bit, whatever steps the optimizer and however blocks are run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lowbit_strategy import Dense, LoCo, WeightCode, WeightDelta
from lowbit_strategy.custom_loop import SyncOptions, attach_fsdp, prepare
from testing.processes.scenarios import Facts, all_but, scenarios
from testing.training.ddp_loop import CPU

WIDTH, STEPS = 48, 6
FAMILIES = {
    "code": (WeightCode(keep="nothing"), WeightCode(), WeightCode(keep="replica")),
    "delta": (WeightDelta(), WeightDelta()),  # needs its replica: a run is compared with itself
}


class SixSteps(Protocol):
    def step(self) -> object: ...


def shard(param: Tensor) -> Tensor:
    """What this rank owns, sharing its memory."""
    return param.to_local() if isinstance(param, DTensor) else param.data


class SignMomentum:
    """An optimizer that is no `torch.optim.Optimizer`, and writes past the version counters."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.params = list(params)
        self.momenta = [torch.zeros_like(shard(param)) for param in self.params]

    def step(self) -> None:
        for param, momentum in zip(self.params, self.momenta, strict=True):
            assert param.grad is not None
            momentum.lerp_(shard(param.grad), 0.1)
            shard(param).data.sub_(momentum.sign(), alpha=1e-3)


class EightBitAdam(torch.optim.Optimizer):
    """Both moments are uint8 tensors with one scale each."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self._step(shard(param), shard(param.grad), self.state[param], group["lr"])

    @staticmethod
    def _step(own: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        for name, value, share in (("mean", grad, 0.1), ("root", grad.abs(), 0.05)):
            earlier = (state[name].float() - 128) * state[f"{name} scale"] if name in state else torch.zeros_like(own)
            moment = earlier.lerp(value, share)
            scale = moment.abs().amax().clamp_min(1e-12) / 127 if moment.numel() else torch.ones(())
            state[name], state[f"{name} scale"] = (moment / scale + 128).round().to(torch.uint8), scale
            state[f"{name} now"] = moment
        own.sub_(lr * state.pop("mean now") / (state.pop("root now") + 1e-3))


OPTIMIZERS: dict[str, Callable[[list[Tensor]], SixSteps]] = {
    "by hand": SignMomentum,
    "fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "8-bit states": EightBitAdam,
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class Net(nn.Module):
    """Blocks that may be recomputed in backward."""

    def __init__(self, recompute: bool | None) -> None:
        super().__init__()
        self.recompute = recompute  # None: not at all; True: by PyTorch's reentrant way
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + (block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute))
        out: Tensor = self.last(x)
        return out


class Trained(NamedTuple):
    """Losses of all steps, and the sums of what this rank owns of each parameter in the end."""

    losses: list[float]
    sums: list[float]


class Compared(NamedTuple):
    """One training for each way to keep weights, and one with exact weights."""

    runs: list[Trained]
    exact: Trained


def train(
    weights: Any, make: Callable[[list[Tensor]], SixSteps], *, recompute: bool | None = None, compiles: bool = False
) -> Trained:
    torch.manual_seed(0)
    model = Net(recompute)
    prepared = prepare(model, LoCo(block_size=32), SyncOptions(weights=weights), scatter=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        if compiles:
            block.forward = torch.compile(block.forward, backend="aot_eager")  # type: ignore[method-assign]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    session = attach_fsdp(model, prepared, device=CPU)
    optimizer = make(list(model.parameters()))
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(STEPS):
        x = torch.randn(4, WIDTH, generator=generator)
        loss = (model(x) - x.roll(1, 1)).square().mean()
        losses.append(loss.item())
        session.begin_step()
        loss.backward()
        optimizer.step()
        for param in model.parameters():
            param.grad = None
        session.end_step()
    session.close()
    return Trained(losses, [float(shard(param).double().sum()) for param in model.parameters()])


def kept(folder: Path, family: str, optimizer: str) -> Compared:
    runs = [train(weights, OPTIMIZERS[optimizer]) for weights in FAMILIES[family]]
    return Compared(runs, train("exact", OPTIMIZERS[optimizer]))


def check(facts: list[Compared]) -> None:
    for rank in facts:
        coded, *others = rank.runs
        assert all(run == coded for run in others)
        assert coded != rank.exact  # its weights were coded
    first, last = (sum(rank.exact.losses[at] for rank in facts) for at in (0, -1))
    assert last < first
    end = sum(rank.runs[0].losses[-1] for rank in facts)
    assert abs(end - last) < 0.2 * (first - last)  # it trains as with exact weights


@scenarios(kept, family=tuple(FAMILIES), optimizer=tuple(OPTIMIZERS))
def test_any_optimizer(facts: list[Compared]) -> None:
    check(facts)


def run_otherwise(folder: Path, family: str, how: str) -> Facts:
    """Blocks recomputed in backward or compiled."""
    ways: dict[str, dict[str, Any]] = {
        "reentrant": {"recompute": True},
        "recomputed": {"recompute": False},
        "compiled": {"compiles": True},
        "compiled and recomputed": {"recompute": False, "compiles": True},
    }
    torch._dynamo.reset()
    counters.clear()
    runs = [train(weights, OPTIMIZERS["foreach"], **ways[how]) for weights in FAMILIES[family]]
    return {
        "compiled": how.startswith("compiled") == (counters["stats"]["unique_graphs"] > 0),
        "compared": Compared(runs, train("exact", OPTIMIZERS["foreach"], **ways[how])),
        "plain": train(FAMILIES[family][0], OPTIMIZERS["foreach"]),
    }


@scenarios(
    run_otherwise,
    family=tuple(FAMILIES),
    how=("reentrant", "recomputed", "compiled", "compiled and recomputed"),
    slow=all_but(how="recomputed"),
)
def test_blocks_that_are_recomputed_or_compiled(facts: list[Facts]) -> None:
    check([rank["compared"] for rank in facts])
    for rank in facts:
        assert rank["compiled"]  # where it was asked for, and only there
        assert rank["compared"].runs[0] == rank["plain"]


def penalised(weights: Any, *, keeps: bool) -> list[float] | str:
    """Losses with a penalty on the slope, or the error; weights None: FSDP2 without this package."""
    torch.manual_seed(0)
    model = Net(None)
    prepared = None if weights is None else prepare(model, Dense(), SyncOptions(weights=weights), scatter=True)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    session = None if prepared is None else attach_fsdp(model, prepared, device=CPU)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(STEPS):
        x = torch.randn(4, WIDTH, generator=generator, requires_grad=True)
        model.set_reshard_after_backward(not keeps)
        model.set_requires_gradient_sync(False)  # type: ignore[operator]
        out = model(x)
        slope = torch.autograd.grad(out.square().sum(), x, create_graph=True)[0]
        model.set_requires_gradient_sync(True)  # type: ignore[operator]
        model.set_reshard_after_backward(True)
        loss = (out - x.detach().roll(1, 1)).square().mean() + 0.1 * slope.square().mean()
        losses.append(loss.item())
        if session is not None:
            session.begin_step()
        try:
            loss.backward()
        except RuntimeError as error:
            return str(error)
        optimizer.step()
        optimizer.zero_grad()
        if session is not None:
            session.end_step(optimizer)
    return losses


def gradients_of_gradients(folder: Path) -> Facts:
    chosen = {"stock": None, "exact": "exact", "nothing": FAMILIES["code"][0], "kept": FAMILIES["code"][1]}
    runs = {name: penalised(weights, keeps=True) for name, weights in chosen.items()}
    return {"runs": runs, "freed": [penalised(weights, keeps=False) for weights in (None, FAMILIES["code"][1])]}


@scenarios(gradients_of_gradients)
def test_a_gradient_penalty_trains_where_fsdp2_lets_it(facts: list[Facts]) -> None:
    for rank in facts:
        runs = rank["runs"]
        assert runs["exact"] == runs["stock"]
        assert runs["kept"] == runs["nothing"] != runs["exact"]
        assert runs["stock"][-1] < runs["stock"][0]
        assert all("storage of size 0" in error for error in rank["freed"])  # FSDP2 has freed what is needed
