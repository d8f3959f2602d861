"""Memory of large models beside ranks that are not there; longer trainings."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.gpu_acceptance.checks import Check, Figures, Missed
from benchmarks.gpu_acceptance.training import SmallGPT, batch, next_token_loss, wrap
from benchmarks.gpu_acceptance.two_ranks import agree, trained
from lowbit_strategy import LoCo, preset
from lowbit_strategy.collectives.comm import GroupComm, Pending
from lowbit_strategy.control import Accordion
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.fitting.memory import memory_of as planned_memory
from lowbit_strategy.hooks.bucket_cap import default_bucket_cap_mb
from lowbit_strategy.methods.zoo.composed import WarmUp
from lowbit_strategy.plan.running import plan_of

WORLD_SIZE = 8
SIZES = {"cuda": {"fsdp": (4096, 32), "ddp": (2048, 24)}, "cpu": {"fsdp": (256, 4), "ddp": (128, 4)}}  # width, layers
PEAK_SLACK = 1.05
METHODS = ("loco", "loco2", "topk", "powersgd")


class _Arrived:
    def wait(self) -> None:
        return None


def _echo(comm: GroupComm, out_WB: Tensor, x_WB: Tensor) -> Pending:
    comm.sent_nbytes += x_WB[0].nbytes * (comm.world_size - 1)
    out_WB.copy_(x_WB[comm.rank : comm.rank + 1].expand_as(out_WB))
    return _Arrived()


def _echo_gather(comm: GroupComm, out_WB: Tensor, x_B: Tensor) -> Pending:
    comm.sent_nbytes += x_B.nbytes * (comm.world_size - 1)
    out_WB.view(comm.world_size, -1).copy_(x_B.reshape(1, -1).expand(comm.world_size, -1))
    return _Arrived()


@contextmanager
def fake_world() -> Iterator[None]:
    """The ``fake`` group moves nothing: messages of the others are taken to be what this rank sends."""
    kept = GroupComm.all_to_all, GroupComm.all_gather
    GroupComm.all_to_all, GroupComm.all_gather = _echo, _echo_gather  # type: ignore[method-assign]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    try:
        yield
    finally:
        dist.destroy_process_group()
        GroupComm.all_to_all, GroupComm.all_gather = kept  # type: ignore[method-assign]


def memory_of(kind: str, compressor: Any, device: torch.device) -> Figures:
    """Four steps: across DDP's rebuild of its buckets, and the end of a warm-up after two."""
    width, layers = SIZES[device.type][kind]
    gc.collect()
    with fake_world():
        with torch.device(device):
            net = SmallGPT(width, layers)
        model, session = wrap(kind, net, compressor, device, bucket_cap_mb=default_bucket_cap_mb(device))
        if session is None and isinstance(model, DistributedDataParallel):
            model.register_comm_hook(None, noop_hook)  # the fake group's all-reduce gives DDP no result
        if device.type == "cuda":  # now: what the model took whole, before it was sharded, is no step's
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        announced = 0
        for step in range(4):
            if session is not None:
                session.begin_step()
                announced = max(announced, announced_nbytes(session.sync))
            next_token_loss(model, batch(step, 0, device)).backward()
            model.zero_grad()
            if session is not None:
                session.end_step()
        figures: Figures = {"parameters": sum(parameter.numel() for parameter in net.parameters())}
        if device.type == "cuda":
            figures["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        if session is not None:
            figures["residual_nbytes"] = session.sync.state.nbytes
            figures["wire_nbytes"] = session.sync.buffers.nbytes
            figures["announced_gb"] = announced / 1e9
            session.close()
    return figures


def memory(device: torch.device) -> Figures:
    figures: Figures = {}
    for kind in ("fsdp", "ddp"):
        plain = memory_of(kind, None, device)
        ours = memory_of(kind, WarmUp(compressor=LoCo(), first=LoCo(bits=8), steps=2), device)
        count = ours["parameters"]
        figures[f"{kind}_parameters"] = count
        figures[f"{kind}_residual_bytes_per_parameter"] = ours["residual_nbytes"] / count
        figures[f"{kind}_wire_bytes_per_parameter"] = ours["wire_nbytes"] / count
        if "peak_gb" in ours:
            figures |= {f"{kind}_peak_gb": ours["peak_gb"], f"{kind}_plain_peak_gb": plain["peak_gb"]}
            figures[f"{kind}_announced_gb"] = ours["announced_gb"]
            no_more_than_announced(kind, ours, plain, figures)
        if not ours["residual_nbytes"] <= 1.3 * count:
            raise AssertionError(f"{kind}: residuals of {ours['residual_nbytes']} bytes for {count} parameters")
    return figures


def announced_nbytes(sync: GradientSync) -> int:
    """What the report says that compression takes in this phase: residuals, messages, weights that are kept."""
    memory = planned_memory(plan_of(sync))
    return memory.residuals + memory.copies + memory.temporary + memory.weights


def no_more_than_announced(kind: str, ours: Figures, plain: Figures, figures: Figures) -> None:
    """Raises:
    Missed: The peak beyond the uncompressed run's is more than was announced.
    """
    beyond = ours["peak_gb"] - plain["peak_gb"]
    if beyond > PEAK_SLACK * ours["announced_gb"] + 0.05:
        announced = f"{ours['announced_gb']:.2f} GB were announced"
        raise Missed(f"{kind}: the peak is {beyond:.2f} GB beyond the uncompressed run's, {announced}", figures)


def methods_train(device: torch.device) -> Figures:
    """On two ranks beside uncompressed DDP: several methods, and a controller that changes between two of them."""
    steps = 200 if device.type == "cuda" else 40
    plain = trained("ddp", preset("dense"), device, steps=steps)[0]["losses"][-1]
    figures: Figures = {"steps": steps, "dense": plain}
    controller = Accordion(light=LoCo(bits=8), heavy=preset("loco2"), eta=0.2, interval=5, unit="steps")
    runs = [(name, preset(name), None) for name in METHODS] + [("controller", LoCo(), controller)]
    for name, compressor, chooser in runs:
        ranks = trained("ddp", compressor, device, steps=steps, controller=chooser)
        agree(ranks)
        first, last = ranks[0]["losses"][0], ranks[0]["losses"][-1]
        figures[name] = last
        if not last < 0.8 * first:
            raise AssertionError(f"{name} does not learn: from {first} to {last}, uncompressed {plain}")
    figures["switches"] = ranks[0]["switches"]
    if not figures["switches"]:
        raise AssertionError("the controller never changed a level after the first step: nothing is shown")
    return figures


CHECKS = (Check(name="memory of large models", run=memory),)
