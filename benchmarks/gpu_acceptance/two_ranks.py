"""Part 2: two ranks on one GPU (or on the CPU): agreement, losses, races, waiting."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import torch

from gpu_acceptance.checks import Check, Figures
from gpu_acceptance.training import train
from lowbit_strategy import Dense, LoCo
from tests.distributed import run_ranks

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


def trained(
    kind: str, compressor: Any, device: torch.device, *, env: dict[str, str | None] | None = None, **options: Any
) -> list[dict[str, Any]]:
    given = {"kind": kind, "compressor": compressor, "device": str(device), "steps": STEPS, **options}
    given.setdefault("backend", backend(device.type))
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(train, 2, folder, given, env=env, timeout=180, process_group=None)


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
    """A warm-up that ends at step 2 regroups while the device is far behind; one kernel at a time must give the same.

    On a CPU, where the worker thread is what could race: twice the same.
    """
    compressor = LoCo(warmup_steps=2, warmup_bits=8)
    behind = {"sleep": 50_000_000} if device.type == "cuda" else {}
    blocking = {"CUDA_LAUNCH_BLOCKING": "1"} if device.type == "cuda" else None
    digests = {}
    for kind in ("ddp", "fsdp"):
        late = trained(kind, compressor, device, **behind)
        orderly = trained(kind, compressor, device, env=blocking)
        agree(late)
        if late[0]["digest"] != orderly[0]["digest"]:
            raise AssertionError(f"{kind}: another result where the device is behind: a race")
        digests[kind] = late[0]["digest"]
    return digests


def no_waiting(device: torch.device) -> Figures:
    if backend(device.type) != "nccl":
        raise AssertionError("gloo itself waits for the device: run this where NCCL takes two ranks, or on two GPUs")
    for kind in ("ddp", "fsdp"):
        agree(trained(kind, LoCo(), device, debug_sync=True))
    return {"set_sync_debug_mode": "error"}


CHECKS = (
    Check(name="ranks agree, losses are right", run=ranks_agree),
    Check(name="no race between streams, or threads", run=no_races),
    Check(name="no step makes the host wait", run=no_waiting, gpu_only="a CPU's host never waits for a device"),
)
