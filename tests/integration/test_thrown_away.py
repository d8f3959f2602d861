"""Gradients that are cleared: thrown away, they leave nothing behind; used, they count."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lowbit_strategy import PRESETS, TopK
from lowbit_strategy.checkpoint.capture import capture
from lowbit_strategy.custom_loop import compress
from testing.log import listen
from testing.processes.scenarios import Facts, all_but, scenarios
from testing.training.plain import COMPRESSORS, batch, load_local, local_values, wrap
from testing.training.regression import BATCH, OUTPUTS, WIDTH, Regression, loader, mlp, strategy, trainer

ALL = {name: preset for name, preset in PRESETS.items() if name not in ("auto",)}
QUICK = ("loco", "topk", "powersgd")
METHODS = tuple(ALL)


def prepared(kind: str, method: str, **options: Any) -> tuple[nn.Sequential, Any, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    net = mlp()
    model = wrap("ddp", net, gradient_as_bucket_view=True) if kind == "views" else wrap(kind, net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return net, model, optimizer, compress(model, optimizer, (COMPRESSORS | ALL)[method], **options)


# -- thrown away -------------------------------------------------------------------------------------------------------


def thrown_away(folder: Path, kind: str, compressor: str, how: str) -> Facts:
    """Some steps are preceded by passes whose gradients are cleared, in one run; in the other there are none."""

    def run(discards: bool) -> tuple[list[Tensor], list[Tensor], int]:
        net, model, optimizer, session = prepared(kind, compressor)
        for step in range(6):
            for at in range(step % 3) if discards else ():
                (100 * model(batch(50 + step + at)).square().mean()).backward()
                optimizer.zero_grad(set_to_none=how == "to none")
            model(batch(step)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=how == "to none")
        state = [tensor.clone() for tensor in session.sync.state.all_tensors()]
        return local_values(net.parameters()), state, session.sync.step_index

    with listen() as lines:
        (some, some_state, num_steps), (never, never_state, _) = run(True), run(False)
    return {
        "weights": all(map(torch.equal, some, never)),
        "state": all(map(torch.equal, some_state, never_state)),
        "steps": num_steps,
        "lines": [line for line in lines if "thrown away" in line or "no optimizer step" in line],
    }


@scenarios(
    thrown_away,
    kind=("ddp", "fsdp"),
    compressor=METHODS,
    how=("to none", "zeros"),
    slow=lambda kind, compressor, how, **_: compressor not in QUICK or (kind == "fsdp") == (how == "zeros"),
)
def test_a_reduction_whose_gradients_are_cleared_leaves_nothing_behind(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["weights"]
        assert rank["state"]
        assert rank["steps"] == 6
        assert not rank["lines"]


def saved(folder: Path, kind: str) -> Facts:
    """Two checkpoints of what is kept for two bits with Adam: before a discarded pass, and after it."""
    torch.manual_seed(0)
    net = mlp()
    model = wrap(kind, net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    session = compress(model, optimizer, "loco2")
    for step in range(5):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = []
    for _ in range(2):
        captured = capture(session.sync)
        kept.append([(keys, x.clone()) for keys, x in tensors({key: captured[key] for key in ("parameters", "own")})])
        (100 * model(batch(9)).square().mean()).backward()
        optimizer.zero_grad()
    session.close()
    return {
        "same": [one[0] == other[0] and torch.equal(one[1], other[1]) for one, other in zip(*kept, strict=True)],
        "squares": any("squares" in keys for keys, _ in kept[0]),
    }


def tensors(tree: Any, *keys: str) -> list[tuple[tuple[str, ...], Tensor]]:
    """All tensors of nested mappings, with their keys."""
    if isinstance(tree, Tensor):
        return [(keys, tree)]
    if not isinstance(tree, Mapping):
        return []
    return [each for key in sorted(tree, key=str) for each in tensors(tree[key], *keys, str(key))]


@scenarios(saved, kind=("ddp", "fsdp"))
def test_a_checkpoint_has_nothing_of_a_discarded_pass(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["squares"]
        assert all(rank["same"])


def overflow(folder: Path, method: str) -> Facts:
    """A loss scaler skips a step right before gradients of two tasks are put together by hand, or nothing comes before
    them. Residuals follow the loss scale, by a power of two.
    """
    found = []
    for skips in (False, True):
        torch.manual_seed(0)
        net = mlp()
        model = wrap("ddp", net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0 if skips else 128.0)
        session = compress(model, optimizer, COMPRESSORS[method], scaler=scaler)
        for factor in (float("inf"),) if skips else ():
            scaler.scale(factor * model(batch(9)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        grads = []
        for task in range(2):
            optimizer.zero_grad()
            scaler.scale(model(batch(task)).square().mean()).backward()
            grads.append([param.grad.clone() for param in net.parameters()])
        for param, one, other in zip(net.parameters(), *grads, strict=True):
            param.grad = one + other
        scaler.step(optimizer)
        found.append([*local_values(net.parameters()), *(x.clone() for x in residuals(session.sync))])
        session.close()
    return {"same": all(map(torch.equal, *found))}


def residuals(sync: Any) -> list[Tensor]:
    return [x / sync.loss_scale for name in sync.specs if (x := sync.state.residual(name)) is not None]


@scenarios(overflow, method=("loco", "topk"))
def test_a_step_that_a_scaler_skips_is_none_of_the_tasks(facts: list[Facts]) -> None:
    assert all(rank["same"] for rank in facts)


def spike(folder: Path, kind: str, method: str, rollback: bool) -> Facts:
    """One batch gives a very large gradient; the loop skips steps whose gradients are too large."""
    net, model, optimizer, session = prepared(kind, method, rollback=rollback)
    skipped = []
    for step in range(24):
        optimizer.zero_grad()
        factor = 1e5 if step == 6 and dist.get_rank() == 1 else 1.0
        (factor * (model(batch(step)) - batch(step)[:, :OUTPUTS]).square().mean()).backward()
        norm = torch.nn.utils.get_total_norm([param.grad for param in net.parameters()])
        if float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm) > 10:
            skipped.append(step)
            continue
        optimizer.step()
    unsent = [session.sync.state.export_unsent(name) for name in session.sync.specs]
    return {
        "skipped": skipped,
        "unsent": max((each.abs().max().item() for each in unsent if each is not None), default=0.0),
    }


@scenarios(
    spike,
    kind=("ddp", "fsdp"),
    method=METHODS,
    rollback=(True, False),
    slow=lambda kind, method, rollback, **_: method not in QUICK or (kind == "fsdp") == rollback,
)
def test_a_skipped_spike_is_skipped_once(facts: list[Facts]) -> None:
    assert facts[0]["skipped"] == [6]
    assert facts[0]["unsent"] < 10


class _Rows(nn.Module):
    """A table of whose rows batches use the first half, which one rank has, and a head with one row."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, WIDTH), nn.Linear(WIDTH, 1, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        made: Tensor = self.head(self.table(ids).tanh())
        return made


def rows_elsewhere(folder: Path, kind: str) -> Facts:
    """Each parameter has an optimizer. In odd steps a pass is cleared, to zeros; in even ones two are added up."""
    undecided, weights = [], []
    for to_none in (False, True):
        torch.manual_seed(0)
        net = _Rows()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")) if kind == "hsdp" else None
        model = wrap(kind, net, mesh=mesh)
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (net.table, net.head)]
        session = compress(model, optimizers, TopK(density=0.1))
        for at in range(8):
            model((torch.arange(4) + at + dist.get_rank()).remainder(4)).square().mean().backward()
            if at % 4 == 0:
                for optimizer in optimizers:
                    optimizer.zero_grad(set_to_none=to_none)
            elif at % 2:
                undecided.append(sorted(session.sync.transactions.undecided))
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=to_none)
        weights.append(local_values(net.parameters()))
    return {"undecided": undecided, "same": all(map(torch.equal, *weights))}


@scenarios(rows_elsewhere, kind=("fsdp",))
def test_ranks_judge_zeros_together(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["undecided"] == [["head.weight", "table.weight"], []] * 4
        assert rank["same"]


@scenarios(rows_elsewhere, world_size=4, kind=("hsdp",))
def test_shards_judge_zeros_together(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["undecided"] == [["head.weight", "table.weight"], []] * 4
        assert rank["same"]


def clipped(folder: Path, kind: str, method: str) -> Facts:
    """A spike whose gradient is clipped, and the norms of later gradients."""

    def run(max_residual: float | None, factor: float) -> float:
        net, model, optimizer, _ = prepared(kind, method, max_residual=max_residual)
        for step in range(16):
            optimizer.zero_grad()
            large = factor if step == 6 else 1.0
            (large * (model(batch(step)) - batch(step)[:, :OUTPUTS]).square().mean()).backward()
            norm: Any = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    return {"bounded": run(10.0, 1e5), "unbounded": run(None, 1e5), "calm": run(None, 1.0), "both": run(10.0, 1.0)}


@scenarios(clipped, kind=("ddp", "fsdp"), method=("loco", "topk"))
def test_a_bound_on_residuals_ends_what_a_clipped_spike_leaves(facts: list[Facts]) -> None:
    assert facts[0]["unbounded"] > 10 * facts[0]["calm"]
    assert facts[0]["bounded"] < 4 * facts[0]["calm"]
    assert facts[0]["both"] < 2 * facts[0]["calm"]


class Skipping(Regression):
    """Clears gradients that are too large just before the step."""

    def __init__(self) -> None:
        super().__init__(optimizer="plain")
        self.skipped: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        factor = 1e5 if batch_idx == 6 and self.global_rank == 1 else 1.0
        return factor * (self(x) - y).square().mean()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norm: Any = torch.nn.utils.get_total_norm([param.grad for param in self.parameters()])
        if float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm) > 10:
            optimizer.zero_grad()
            self.skipped.append(self.trainer.fit_loop.batch_idx)


def cleared_in_lightning(folder: Path, kind: Any, method: str) -> Facts:
    model = Skipping()
    trainer(strategy(kind, (COMPRESSORS | ALL)[method]), max_steps=20).fit(model, loader(192))
    return {"skipped": model.skipped}


@scenarios(cleared_in_lightning, kind=("ddp", "fsdp"), method=QUICK)
def test_a_spike_that_a_hook_of_lightning_clears_is_skipped_once(facts: list[Facts]) -> None:
    assert facts[0]["skipped"] == [6]


def two_networks(folder: Path, kind: str) -> Facts:
    """A generator's loss reaches the critic, whose gradients are cleared before its own pass. Nothing moves, so that
    the sum of what the critic is given has to be the number of steps times its exact gradient.
    """
    torch.manual_seed(0)
    generator, critic = mlp(), nn.Sequential(nn.Linear(OUTPUTS, 64), nn.Tanh(), nn.Linear(64, 1))
    net = nn.Sequential(generator, critic)
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    exact = torch.autograd.grad(critic(generator(x).detach()).mean(), critic[0].weight)[0]
    model = wrap(kind, net)
    optimizers = [torch.optim.SGD(part.parameters(), lr=1e-12) for part in (generator, critic)]
    compress(model, optimizers, COMPRESSORS["topk"])
    total: Any = 0
    for _ in range(60):
        for optimizer, sign in zip(optimizers, (-1, 1), strict=True):
            optimizer.zero_grad()
            (sign * model(x).mean()).backward()
            if optimizer is optimizers[1]:
                grad = critic[0].weight.grad
                total = total + (grad.full_tensor() if hasattr(grad, "full_tensor") else grad)
            optimizer.step()
            if optimizer is optimizers[1]:
                optimizers[0].zero_grad()
            else:
                optimizers[1].zero_grad()
    return {"error": ((total / 60 - exact).norm() / exact.norm()).item()}


@scenarios(two_networks, kind=("ddp", "fsdp"), slow=all_but(kind="ddp"))
def test_a_critic_does_not_get_what_its_generators_passes_left(facts: list[Facts]) -> None:
    assert facts[0]["error"] < 0.05


# -- used --------------------------------------------------------------------------------------------------------------


def replaced(params: list[nn.Parameter], grads: list[Tensor], optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad


def overwritten(params: list[nn.Parameter], grads: list[Tensor], optimizer: torch.optim.Optimizer) -> None:
    for param, grad in zip(params, grads, strict=True):
        assert param.grad is not None
        param.grad.copy_(grad)


def other_data(params: list[nn.Parameter], grads: list[Tensor], optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)
    for param, grad in zip(params, grads, strict=True):
        assert param.grad is not None
        param.grad.data = grad


ASSIGN: dict[str, Callable[[list[nn.Parameter], list[Tensor], torch.optim.Optimizer], None]] = {
    "replaced": replaced,
    "overwritten": overwritten,
    "other data": other_data,
}


def surgery(folder: Path, kind: str, method: str, how: str) -> Facts:
    """One backward pass per task; the step takes the mean. Nothing moves: what was applied and what is unsent must be
    the number of steps times the exact gradient.
    """
    net, model, optimizer, session = prepared(kind, method)
    for group in optimizer.param_groups:
        group["lr"] = 1e-12
    x, params, num_steps = batch(0), list(net.parameters()), 20
    tasks = [slice(0, 3), slice(3, 5), slice(5, OUTPUTS)]
    exact = mlp_gradients(x, tasks)
    name = "2.weight"
    total = torch.zeros_like(exact)
    for step in range(num_steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        kept = []
        for task in tasks:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            model(x)[:, task].square().mean().backward()
            kept.append([param.grad.clone() for param in params])
        ASSIGN[how](params, [sum(each) / len(tasks) for each in zip(*kept, strict=True)], optimizer)
        grad: Any = dict(net.named_parameters())[name].grad
        total += grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        optimizer.step()
    unsent = session.sync.state.export_unsent(name)
    unsent = torch.zeros(exact.numel()) if unsent is None else unsent
    dist.all_reduce(unsent)
    lacking = num_steps * exact - total - unsent.view_as(exact) / dist.get_world_size()
    return {"lacking": (lacking.norm() / exact.norm()).item(), "error": (exact - total / num_steps).norm().item()}


def mlp_gradients(x: Tensor, tasks: list[slice]) -> Tensor:
    """Of one weight: the mean over tasks and ranks."""
    torch.manual_seed(0)
    net = mlp()
    grads = [torch.autograd.grad(net(x)[:, task].square().mean(), net[2].weight)[0] for task in tasks]
    mean = torch.stack(grads).mean(0)
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


CONSERVING = {"topk": 1e-4, "powersgd": 1e-3, "efsignsgd": 1e-3, "loco": 0.3}


@scenarios(
    surgery,
    kind=("ddp", "fsdp", "views"),
    method=tuple(CONSERVING),
    how=("replaced", "overwritten"),
    slow=lambda kind, method, how, **_: (
        method not in ("loco", "topk") or (kind, how) not in (("ddp", "replaced"), ("fsdp", "overwritten"))
    ),
)
def test_gradients_that_are_cleared_and_put_together_are_conserved(
    facts: list[Facts], request: pytest.FixtureRequest
) -> None:
    method = request.node.callspec.id.split("-")[1]
    assert facts[0]["lacking"] < CONSERVING[method]


@scenarios(surgery, kind=("ddp",), method=("topk",), how=("other data",))
def test_gradients_with_other_data_are_conserved(facts: list[Facts]) -> None:
    assert facts[0]["lacking"] < CONSERVING["topk"]


# -- saved -------------------------------------------------------------------------------------------------------------


def resumed(folder: Path, kind: str, method: str) -> Facts:
    """Two optimizers, of which the second steps in every third step; saved while its reductions are open."""

    def run(first: int, last: int, *, saves: bool = False) -> list[Tensor]:
        torch.manual_seed(0)
        net = mlp()
        model = wrap(kind, net)
        params = list(net.parameters())
        optimizers = [torch.optim.SGD(part, lr=0.1) for part in (params[:2], params[2:])]
        session = compress(model, optimizers, (COMPRESSORS | ALL)[method])
        if first:
            load_local(params, torch.load(folder / f"{dist.get_rank()}.pt"))
            session.load(folder / "saved", torch.load(folder / "stamp.pt"))
            session.resume()
        for step in range(first, last):
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizers[0].step()
            if saves and step == 5:
                with session.save(folder / "saved") as stamp:
                    torch.save(local_values(params), folder / f"{dist.get_rank()}.pt")
                    if dist.get_rank() == 0:
                        torch.save(stamp, folder / "stamp.pt")
                dist.barrier()
            if step % 3 == 0:
                optimizers[1].step()
        session.finish()
        return [*local_values(params), *[tensor.clone() for tensor in session.sync.state.all_tensors()]]

    straight, saving, again = run(0, 10), run(0, 10, saves=True), run(6, 10)
    return {"saving": all(map(torch.equal, straight, saving)), "resumed": all(map(torch.equal, straight, again))}


@scenarios(resumed, kind=("ddp", "fsdp"), method=METHODS, slow=all_but(method=("loco", "topk"), kind="ddp"))
def test_what_is_saved_while_reductions_are_open_resumes_to_the_bit(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["saving"]
        assert rank["resumed"]
