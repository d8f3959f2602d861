"""`follows_rate` under a schedule: changes of the rate matter alone, groups have their own, resumed runs are equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit_strategy.custom_loop import SyncOptions, attach_ddp, compress, prepare
from testing.processes.scenarios import Facts, all_but, scenarios
from testing.training.plain import COMPRESSORS, batch, load_local, local_values, wrap
from testing.training.regression import ByStep, Kind, loader, mlp, strategy, trainer

SCHEDULES = {  # of two parameter groups, over 10 steps; the first begins at zero
    "changing": ([0.0, 0.02, 0.05, 0.1, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002], [0.1] * 5 + [0.01] * 5),
    "constant": ([0.1] * 10, [0.05] * 10),
}


def trained(folder: Path, kind: str, method: str) -> Facts:
    """Gradients are cleared before every third step; runs are saved and resumed where the rate changes."""

    def run(schedule: str, first: int, last: int, *, saves: bool = False, **options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        net = mlp()
        model = wrap(kind, net)
        params = list(net.parameters())
        rates = SCHEDULES[schedule]
        optimizer = torch.optim.SGD([{"params": params[:2]}, {"params": params[2:]}], lr=0.1)
        session = compress(model, optimizer, COMPRESSORS[method], **options)
        if first:
            load_local(params, torch.load(folder / f"{dist.get_rank()}.pt"))
            session.load(folder / "saved", torch.load(folder / "stamp.pt"))
            session.resume()
        for step in range(first, last):
            for group, of_group in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = of_group[step]
            if step % 3 == 2:
                (100 * model(batch(50 + step)).square().mean()).backward()
                optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if saves and step == 4:
                with session.save(folder / "saved") as stamp:
                    torch.save(local_values(params), folder / f"{dist.get_rank()}.pt")
                    if dist.get_rank() == 0:
                        torch.save(stamp, folder / "stamp.pt")
                dist.barrier()
        session.finish()
        return [*local_values(params), *[tensor.clone() for tensor in session.sync.state.all_tensors()]]

    follows: dict[str, Any] = {"follows_rate": True}
    straight = run("changing", 0, 10, saves=True, **follows)
    return {
        "resumed": all(map(torch.equal, straight, run("changing", 5, 10, **follows))),
        "matters": not all(map(torch.equal, straight, run("changing", 0, 10))),
        "constant": all(map(torch.equal, run("constant", 0, 10, **follows), run("constant", 0, 10))),
    }


@scenarios(trained, kind=("ddp", "fsdp"), method=("loco", "topk"), slow=all_but(kind="ddp", method="loco"))
def test_residuals_follow_the_rate_of_their_group(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank == {"resumed": True, "matters": True, "constant": True}


class Scheduled(ByStep):
    """The learning rate halves after every second step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fitted(folder: Path, kind: Kind) -> Facts:
    """With Lightning; resumed between two steps of different rates."""

    def run(steps: int, ckpt: Path | None = None, **options: Any) -> tuple[Any, list[Tensor]]:
        torch.manual_seed(0)
        model = Scheduled()
        made = trainer(strategy(kind, "loco", **options), max_steps=steps)
        made.fit(model, loader(), ckpt_path=ckpt)
        return made, local_values(model.parameters())

    straight, half = run(8, follows_rate=True)[1], run(4, follows_rate=True)[0]
    half.save_checkpoint(folder / "half.ckpt")
    again = run(8, folder / "half.ckpt", follows_rate=True)[1]
    return {
        "resumed": all(map(torch.equal, straight, again)),
        "matters": not all(map(torch.equal, straight, run(8)[1])),
    }


@scenarios(fitted, kind=("ddp", "fsdp"), slow=all_but(kind="fsdp"))
def test_residuals_follow_a_scheduler_of_lightning(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank == {"resumed": True, "matters": True}


def replaced(folder: Path, given: bool) -> Facts:
    """The loop goes on with other optimizers, and returns to the first; all live on. `given`: whether to `compress`."""
    net = mlp()
    model = wrap("ddp", net)
    optimizers = [torch.optim.SGD(model.parameters(), lr=rate) for rate in (0.1, 0.05, 0.02)]
    if given:
        session = compress(model, optimizers[0], COMPRESSORS["loco"], follows_rate=True)
    else:
        session = attach_ddp(model, prepare(net, COMPRESSORS["loco"], SyncOptions(follows_rate=True)))
    seen = []
    for optimizer in [*optimizers, optimizers[0]]:
        session.begin_step()
        model(batch(0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        session.end_step(optimizer)
        known = session.sync.learning_rates
        seen.append({known.first_rate(), *known.rates().values()} - {None})
    session.finish()
    return {"seen": seen}


@scenarios(replaced, given=(True, False))
def test_the_rate_is_that_of_the_optimizer_that_steps(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["seen"] == [{0.1}, {0.05}, {0.02}, {0.1}]
