"""What DDP's hook and FSDP2's reduce-scatter do to gradients: exact laws, with float16's loss scaling and idle experts.

Plain PyTorch, without a trainer, so that every rank's own gradient can be computed beside.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import Exact, LoCo
from lowbit_strategy.attach.ddp import attach_ddp
from lowbit_strategy.attach.fsdp import attach_fsdp
from lowbit_strategy.attach.prepare import prepare
from lowbit_strategy.attach.session import Session
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.model.fsdp_sharding import ShardPolicy, shard_module
from testing.processes.scenarios import Facts, all_but, scenarios
from testing.training.comparing import full, full_parameters
from testing.training.regression import KINDS, MIN_SHARD_NUMEL, WIDTH, Kind, mlp

Grads = dict[str, Tensor]
CPU = torch.device("cpu")
EVERYTHING = LoCo(block_size=32, exempt=("@vector",), high_precision=())
EXACT = replace(EVERYTHING, residual="float32", reset_steps=None)


class Bench:
    """A model under DDP or FSDP2, and a plain copy of it for this rank's own gradients."""

    def __init__(self, kind: Kind, net: nn.Module, compressor: LoCo, **options: Any) -> None:
        self.net, self.plain = net, copy.deepcopy(net)
        scaler = options.pop("has_scaler", False)
        # gradients of the very parameters that the copy has
        settings = SyncOptions(weights=Exact() if kind == "fsdp" else None)
        prepared = prepare(net, compressor, settings, scatter=kind == "fsdp")
        self.session: Session
        if kind == "ddp":
            self.model: nn.Module = DistributedDataParallel(net, bucket_cap_mb=0.01, **options)
            self.session = attach_ddp(self.model, prepared, device=CPU, has_scaler=scaler)
        else:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            shard_module(net, mesh, ShardPolicy(min_numel=MIN_SHARD_NUMEL))
            self.model = net
            self.session = attach_fsdp(net, prepared, device=CPU, has_scaler=scaler)
        self.sync = self.session.sync

    def own_grads(self, loss: Callable[[nn.Module], Tensor]) -> Grads:
        """This rank's gradient at the present parameters, nothing synchronized."""
        self.plain.load_state_dict(full_parameters(self.net), strict=False)
        params = dict(self.plain.named_parameters())
        grads = torch.autograd.grad(loss(self.plain), list(params.values()), allow_unused=True)
        pairs = zip(params.items(), grads, strict=True)
        return {name: torch.zeros_like(param) if grad is None else grad for (name, param), grad in pairs}

    def grads(self) -> Grads:
        params = self.net.named_parameters()
        return {name: torch.zeros(full(p).shape) if p.grad is None else full(p.grad) for name, p in params}

    def carryover(self) -> Grads:
        """What all ranks and owners together have not sent yet, of the mean."""
        carryover = {}
        for name, spec in self.sync.specs.items():
            unsent = self.sync.state.export_unsent(name)
            total = torch.zeros(spec.numel) if unsent is None else mean(unsent)
            carryover[name] = total.view(spec.shape)
        return carryover


def mean(x: Tensor) -> Tensor:
    """Over the ranks, the same bits on all of them."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.stack(parts).double().mean(0).float()


def regression(step: int, scale: float = 1.0) -> Callable[[nn.Module], Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    x, y = torch.randn(8, WIDTH, generator=generator), torch.randn(8, 8, generator=generator)
    return lambda module: F.mse_loss(module(x), y) * scale


def add_(total: Grads, grads: Grads) -> None:
    for name, grad in grads.items():
        total[name] = total.get(name, torch.zeros(())) + grad.double()


def worst(total: Grads, expected: Grads) -> float:
    """The largest relative error of any parameter."""
    return max(float((total[n] - expected[n]).norm() / expected[n].norm().clamp(min=1e-12)) for n in total)


# -- one step -------------------------------------------------------------------------------------------------------


def _half_steps(bench: Bench, name: str, x: Tensor) -> Tensor:
    """Half of a 4-bit quantization step of every element's block."""
    row = bench.sync.state.row_numel(name)
    half = torch.zeros(x.numel())
    for start in range(0, x.numel(), row):
        for block in range(start, min(start + row, x.numel()), 32):
            stop = min(block + 32, start + row, x.numel())
            half[block:stop] = x.view(-1)[block:stop].abs().max() / 7 / 2
    return half.view(x.shape)


def first_step(folder: Path, kind: Kind) -> Facts:
    bench = Bench(kind, mlp(), replace(EVERYTHING, codebook="uniform"))
    loss = regression(0)
    own = bench.own_grads(loss)
    bench.session.begin_step()
    loss(bench.model).backward()
    excess, dense = {}, {}
    for name, grad in bench.grads().items():
        exact = mean(own[name])
        error = (grad - exact).abs()
        if bench.sync.state.assignments[name].kind == "exempt":
            dense[name] = worst({name: grad}, {name: exact})
            continue
        bound = mean(_half_steps(bench, name, own[name]))
        if kind == "ddp":
            bound = bound + _half_steps(bench, name, exact).maximum(_half_steps(bench, name, exact + bound))
        excess[name] = (error / bound.clamp(min=1e-12)).max().item()
    return {"excess": excess, "dense": dense}


def _check_first_step(facts: list[Facts]) -> None:
    for rank in facts:
        assert set(rank["excess"]) == {"0.weight", "2.weight", "4.weight"}
        assert all(0.3 < excess < 1.02 for excess in rank["excess"].values())  # scales are rounded to 16 bits
        assert all(error < 1e-6 for error in rank["dense"].values())


@scenarios(first_step, kind=KINDS)
def test_one_step_is_within_half_a_quantization_step_a_hop(facts: list[Facts]) -> None:
    _check_first_step(facts)


@scenarios(first_step, kind=KINDS, world_size=3)
def test_one_step_on_three_ranks(facts: list[Facts]) -> None:
    _check_first_step(facts)


# -- many steps -----------------------------------------------------------------------------------------------------


class Mixture(nn.Module):
    """A shared layer and three experts, of which a step uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, 64)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 8)) for _ in range(3))
        self.chosen = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[self.chosen](torch.tanh(self.shared(x)))


def _choice(step: int) -> int:
    """Alike on all ranks, different, and the third expert idle everywhere but in two steps."""
    if step in (4, 9):
        return 2
    return (step + dist.get_rank()) % 2 if step % 3 else 0


def conservation(folder: Path, kind: Kind, net: str) -> Facts:
    mixture = net == "mixture"
    bench = Bench(
        kind,
        Mixture() if mixture else mlp(),
        EXACT,
        **({"find_unused_parameters": True} if mixture and kind == "ddp" else {}),
    )
    optimizer = torch.optim.SGD(bench.net.parameters(), lr=0.05)
    came, sent, prints = {}, {}, []
    for step in range(12):
        if mixture:
            bench.net.chosen = bench.plain.chosen = _choice(step)
        loss = regression(step)
        add_(came, {name: mean(grad) for name, grad in bench.own_grads(loss).items()})
        optimizer.zero_grad()
        bench.session.begin_step()
        loss(bench.model).backward()
        add_(sent, bench.grads())
        optimizer.step()
        bench.session.end_step()
        prints.append({name: value.tolist() for name, value in bench.grads().items()})
    without = worst(sent, came)
    add_(sent, bench.carryover())
    return {"error": worst(sent, came), "without": without, "prints": prints, "steps": bench.sync.step_index}


@scenarios(conservation, kind=KINDS, net=("mlp", "mixture"))
def test_what_came_in_was_sent_or_is_carried_over(facts: list[Facts]) -> None:
    assert facts[0]["prints"] == facts[1]["prints"]
    assert facts[0]["steps"] == 12
    for rank in facts:
        assert rank["error"] < 2e-6
        assert rank["without"] > 1e-3


@scenarios(conservation, kind=KINDS, net=("mixture",), world_size=3, slow=all_but(kind="ddp"))
def test_what_came_in_was_sent_or_is_carried_over_on_three_ranks(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["prints"] == facts[0]["prints"]
        assert rank["error"] < 2e-6


# -- float16 --------------------------------------------------------------------------------------------------------

BAD_STEP = 3


def _poison(loss: Callable[[nn.Module], Tensor], what: str) -> Callable[[nn.Module], Tensor]:
    if what == "loss":
        return lambda module: loss(module) * torch.inf

    def with_one_bad_element(module: nn.Module) -> Tensor:
        total = loss(module)
        weight = getattr(module, "module", module)[4].weight  # one rank owns this element
        return total + (weight[0, 0] * torch.tensor(torch.inf)).nan_to_num(0.0, 0.0, 0.0)  # its gradient: 0 * inf

    return with_one_bad_element


def loss_scaling(folder: Path, kind: Kind, what: str) -> Facts:
    bench = Bench(kind, mlp(), EXACT, has_scaler=True)
    optimizer = torch.optim.SGD(bench.net.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    came, sent, scales, seen = {}, {}, [], {}
    for step in range(8):
        loss, bad = regression(step), step == BAD_STEP
        own = bench.own_grads(loss)
        before = (
            [p.detach().clone() for p in bench.net.parameters()],
            [t.clone() for t in bench.sync.state.all_tensors()],
        )
        optimizer.zero_grad()
        bench.session.begin_step(scaler)
        scale = scaler.get_scale()
        is_source = bad and dist.get_rank() == dist.get_world_size() - 1
        scaler.scale((_poison(loss, what) if is_source else loss)(bench.model)).backward()
        grads = bench.grads()
        scaler.step(optimizer)
        scaler.update()
        counted = bench.session.end_step(scaler=scaler)
        scales.append(scaler.get_scale())
        if counted:
            add_(came, {name: mean(grad) for name, grad in own.items()})
            add_(sent, {name: grad / scale for name, grad in grads.items()})
            continue
        after = (list(bench.net.parameters()), bench.sync.state.all_tensors())
        seen["parameters"], seen["state"] = (
            all(bool((a == b).all()) for a, b in zip(*pair, strict=True)) for pair in zip(before, after, strict=True)
        )
        seen["finite"] = all(bool(grad.isfinite().all()) for grad in grads.values())
        seen["step"] = step
    add_(sent, {name: carryover / bench.sync.loss_scale for name, carryover in bench.carryover().items()})
    clean = all(bool(tensor.isfinite().all()) for tensor in bench.sync.state.all_tensors())
    return seen | {"error": worst(sent, came), "scales": scales, "clean": clean, "skipped": bench.sync.num_skipped}


@scenarios(loss_scaling, kind=KINDS, what=("loss", "element"))
def test_overflow_is_seen_by_all_and_leaves_no_trace(facts: list[Facts]) -> None:
    for rank in facts:
        assert not rank["finite"]
        assert rank["step"] == BAD_STEP
        assert rank["parameters"]
        assert rank["state"]
        assert rank["clean"]
        assert rank["skipped"] == 1
        # doubled after two good steps, halved by the overflow
        assert rank["scales"] == [2.0**n for n in (10, 11, 11, 10, 10, 11, 11, 12)]
        assert rank["error"] < 2e-6  # in units of the unscaled gradient, whatever the scale was
