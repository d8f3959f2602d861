"""Trainings that are interrupted: saved and resumed, fitted a second time, or met by a step that overflows in fp16."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.gpu_acceptance.checks import Figures
from benchmarks.gpu_acceptance.training import Training, digest, start, wrap
from benchmarks.gpu_acceptance.two_ranks import agree, ranks_of
from lowbit_strategy import Dense, LoCo

BEFORE, AFTER = 4, 3  # steps
TOO_LARGE = 2.0**30  # a loss scale at which fp16 gradients overflow until it has been halved some times


def parameters(training: Training) -> list[Tensor]:
    """This rank's part of each."""
    values = [parameter.detach() for parameter in training.net.parameters()]
    return [value.to_local() if isinstance(value, DTensor) else value for value in values]


def until_interrupted(rank: int, options: dict[str, Any]) -> Training:
    """LoCo, and then `Dense`, which keeps no residual: what LoCo has not sent waits for the next gradient."""
    training = Training(rank, options)
    for step in range(BEFORE):
        training.step(step)
    training.sync.use(Dense())
    return training


def after(training: Training) -> int:
    for step in range(BEFORE, BEFORE + AFTER):
        training.step(step)
    training.close()
    return digest(training.net)


def three_ways(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Parameters at the end of a training that was not interrupted, saved and resumed, or fitted a second time."""
    start(rank, world_size, folder, options)
    never = after(until_interrupted(rank, options))

    training = until_interrupted(rank, options)
    waiting = len(training.sync.state.carryover.waiting)
    path = Path(folder) / "checkpoint"
    assert training.session is not None
    with training.session.save(path) as stamp:
        pass
    weights = [value.clone() for value in parameters(training)]
    optimizer = copy.deepcopy(training.optimizer.state_dict())
    first_fit = training.session
    first_fit.close()
    training.model, training.session = wrap(options["kind"], training.net, Dense(), training.device)
    assert training.session is not None
    training.sync = training.session.sync
    training.session.adopt(first_fit)
    second_fit = after(training)

    training = Training(rank, options | {"compressor": Dense()})
    for value, saved in zip(parameters(training), weights, strict=True):
        value.copy_(saved)
    training.optimizer.load_state_dict(optimizer)
    assert training.session is not None
    training.session.load(path, stamp)
    return {"never": never, "second fit": second_fit, "resumed": after(training), "waiting": waiting}


def continued(device: torch.device) -> Figures:
    """Bit for bit as if nothing had happened, with residuals that wait for a method that keeps none."""
    figures: Figures = {}
    for kind in ("ddp", "fsdp"):
        for rank in ranks_of(three_ways, kind, LoCo(), device):
            if not rank["waiting"]:
                raise AssertionError(f"{kind}: nothing waits to be carried over, so nothing is shown")
            for way in ("second fit", "resumed"):
                if rank[way] != rank["never"]:
                    raise AssertionError(f"{kind}: {way}: other parameters than without an interruption")
            figures[f"{kind}_parameters_carried_over"] = rank["waiting"]
    return figures


def overflowing(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """fp16 autocast with a loss scale that is far too large at first."""
    start(rank, world_size, folder, options)
    scaler = torch.amp.GradScaler(options["device"].partition(":")[0], init_scale=TOO_LARGE, growth_interval=1000)
    training = Training(rank, options | {"scaler": scaler})
    losses, skipped, kept = [], 0, True
    for step in range(options["steps"]):
        before = [value.clone() for value in (*parameters(training), *training.sync.state.all_tensors())]
        losses.append(float(training.step(step)))
        if training.sync.num_skipped > skipped:
            skipped = training.sync.num_skipped
            now = (*parameters(training), *training.sync.state.all_tensors())
            kept &= all(torch.equal(old, new) for old, new in zip(before, now, strict=True))
    scale = scaler.get_scale()
    training.close()
    return {"losses": losses, "skipped": skipped, "kept": kept, "scale": scale, "digest": digest(training.net)}


def overflow(device: torch.device) -> Figures:
    """Every rank skips the same steps, which leave parameters and residuals as they were; then the training learns."""
    figures: Figures = {}
    for kind in ("ddp", "fsdp"):
        ranks = ranks_of(overflowing, kind, LoCo(), device, steps=40)
        agree(ranks)
        for rank in ranks:
            halved = TOO_LARGE / 2 ** rank["skipped"]
            if not rank["skipped"] or rank["scale"] != halved:
                raise AssertionError(f"{kind}: {rank['skipped']} steps skipped and the loss scale is {rank['scale']}")
            if not rank["kept"]:
                raise AssertionError(f"{kind}: a skipped step has changed parameters or residuals")
            if not rank["losses"][-1] < 0.9 * rank["losses"][0]:
                raise AssertionError(f"{kind}: does not learn after the overflow: {rank['losses']}")
        figures |= {f"{kind}_skipped": ranks[0]["skipped"], f"{kind}_loss": ranks[0]["losses"][-1]}
    return figures
