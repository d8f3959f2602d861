"""Two ranks on one GPU (or on the CPU): agreement, losses, races, waiting."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_acceptance.checks import Check, Figures, LeftOut
from benchmarks.gpu_acceptance.profiling import LAUNCHES_BAR, profiled
from benchmarks.gpu_acceptance.training import train
from lowbit_strategy import Dense, LoCo
from lowbit_strategy.methods.zoo.composed import WarmUp
from testing.processes.ranks import run_ranks

STEPS = 12


@functools.cache
def backend(kind: str) -> str:
    """NCCL where two ranks may share the GPU, else gloo, which stages CUDA tensors on the host."""
    if kind != "cuda":
        return "gloo"
    try:
        trained("ddp", Dense(), torch.device("cuda", 0), steps=1, backend="nccl")
    except AssertionError as error:
        print(f"NCCL refuses two ranks on one GPU, gloo instead: {str(error)[-300:]}")
        return "gloo"
    return "nccl"


def trained(kind: str, compressor: Any, device: torch.device, **options: Any) -> list[dict[str, Any]]:
    return ranks_of(train, kind, compressor, device, **options)


def ranks_of(
    worker: Callable[..., dict[str, Any]],
    kind: str,
    compressor: Any,
    device: torch.device,
    *,
    env: dict[str, str | None] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """What two ranks of `worker` return."""
    given = {"kind": kind, "compressor": compressor, "device": str(device), "steps": STEPS, **options}
    if "backend" not in given:
        given["backend"] = backend(device.type)
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(worker, 2, folder, given, env=env, timeout=180, process_group=None)


def agree(ranks: list[dict[str, Any]]) -> None:
    digests = [rank["digest"] for rank in ranks]
    if len(set(digests)) != 1:
        raise AssertionError(f"the ranks' parameters differ: {digests}")


def ranks_agree(device: torch.device) -> Figures:
    """After every kind of training; and the loss is the CPU's, or on a CPU that of uncompressed DDP."""
    figures: Figures = {"backend": backend(device.type)}
    for kind in ("ddp", "fsdp"):
        ranks = trained(kind, LoCo(bits=8), device)
        agree(ranks)
        other = trained(kind, LoCo(bits=8) if device.type == "cuda" else Dense(), torch.device("cpu"))
        last, wanted = ranks[0]["losses"][-1], other[0]["losses"][-1]
        figures |= {f"{kind}_loss": last, f"{kind}_loss_elsewhere": wanted}
        figures[f"{kind}_backward_host_ms"] = ranks[0]["backward_host_ms"]
        if not abs(last - wanted) < 0.05 * wanted:
            raise AssertionError(f"{kind}: loss {last}, elsewhere {wanted}")
    return figures


def no_races(device: torch.device) -> Figures:
    """Whoever falls behind, the result is that of one kernel at a time. A warm-up ends meanwhile and regroups.

    1. the backward pass is late: a bucket that is encoded before it is complete would show
    2. the codec's stream, on a CPU its thread, is late before every encode: memory given back too early would show
    """
    compressor = WarmUp(compressor=LoCo(), first=LoCo(bits=8), steps=2)
    cuda = device.type == "cuda"
    provoked = {"late encode": {"late": 20_000_000}} | ({"late backward": {"sleep": 50_000_000}} if cuda else {})
    figures: Figures = {}
    for kind in ("ddp", "fsdp"):
        orderly = trained(kind, compressor, device, env={"CUDA_LAUNCH_BLOCKING": "1"} if cuda else None)
        for how, options in provoked.items():
            late = trained(kind, compressor, device, **options)
            agree(late)
            if late[0]["digest"] != orderly[0]["digest"]:
                raise AssertionError(f"{kind}, {how}: another result than one kernel at a time: a race")
            figures[f"{kind}, {how}"] = "same bits"
        if not late[0]["buckets"] and not cuda:
            raise AssertionError(f"{kind}: no bucket was held up, so nothing was provoked")
    return figures


def launches_and_overlap(device: torch.device) -> Figures:
    """What compression launches beyond plain DDP and FSDP2 (on a CPU: ATen operations), and what runs meanwhile."""
    figures: Figures = {}
    for kind in ("ddp", "fsdp"):
        plain = ranks_of(profiled, kind, None, device)[0]
        ours = ranks_of(profiled, kind, LoCo(), device, count=True)[0]
        per_bucket = (ours["launches"] - plain["launches"]) / ours["buckets"]
        figures |= {f"{kind}_launches_per_bucket": per_bucket, f"{kind}_overlap": ours["overlap"]}
        if not per_bucket <= LAUNCHES_BAR:
            raise AssertionError(f"{kind}: {per_bucket:.0f} launches per bucket, at most {LAUNCHES_BAR} are allowed")
    if device.type == "cuda" and not figures["ddp_overlap"] > 0:
        raise AssertionError("ddp: no message travels while the backward pass runs")
    return figures


def no_waiting(device: torch.device) -> Figures:
    """Without the digest, which the host reads in a few steps on purpose. A CPU runs CUDA's host code on no data."""
    if device.type != "cuda":
        return host_code_waits_for_nothing()
    if backend(device.type) != "nccl":
        raise LeftOut("gloo itself waits for the device: run this where NCCL takes two ranks, or on two GPUs")
    for kind in ("ddp", "fsdp"):
        agree(trained(kind, LoCo(), device, debug_sync=True, check_digest=False))
    return {"set_sync_debug_mode": "error"}


def host_code_waits_for_nothing() -> Figures:
    from testing.cuda.steps import check_no_step_waits

    for sharded in (False, True):
        check_no_step_waits(LoCo(), torch.float32, sharded=sharded)
    return {"host code of CUDA": "3 steps of 8 ranks, no look at the device"}


CHECKS = (
    Check(name="ranks agree, losses are right", run=ranks_agree),
    Check(name="no race between streams, or threads", run=no_races),
    Check(name="launches per bucket, overlap", run=launches_and_overlap),
    Check(name="no step makes the host wait", run=no_waiting),
)
