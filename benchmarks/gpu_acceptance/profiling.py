"""What PyTorch's profiler shows of a step: launches, and how much of the exchange runs beside the backward pass."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_acceptance.training import Training, start

LAUNCHES_BAR = 40  # per bucket, beyond what plain DDP or FSDP2 launches
NO_KERNEL = re.compile(  # operations that only make or look at a tensor
    "alias|as_strided|contiguous|detach|empty(_.*)?|expand|flatten|narrow|permute|reshape|resize_|select|slice|split(_.*)?"
    "|squeeze|t|transpose|unflatten|unsqueeze|view(_as)?"
)
WARM_STEPS, SEEN_STEPS = 4, 3  # DDP rebuilds its buckets after the first

Interval = tuple[float, float]


def profiled(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """A step's launches (on a CPU: ATen operations of all threads) and buckets; how much of the exchange overlaps."""
    start(rank, world_size, folder, options)
    training = Training(rank, options)
    for step in range(WARM_STEPS):
        training.step(step)
    before, cuda = training.buckets.count, training.device.type == "cuda"
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    with profile(activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True)) as seen:
        for step in range(WARM_STEPS, WARM_STEPS + SEEN_STEPS):
            training.step(step)
        if cuda:
            torch.cuda.synchronize()
    training.close()
    trace = Path(folder) / f"trace{rank}.json"
    seen.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    return {
        "launches": len([*filter(is_launch, events)] if cuda else operations(events)) / SEEN_STEPS,
        "buckets": (training.buckets.count - before) / SEEN_STEPS,
        "overlap": overlap(events, cuda=cuda),
    }


def is_launch(event: dict[str, Any]) -> bool:
    """Kernels, Triton's too."""
    return event.get("cat") in ("cuda_runtime", "cuda_driver") and "LaunchKernel" in event["name"]


def operations(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that would be a kernel on a GPU: not views, nor what only makes a tensor, nor parts of another of them.

    A CPU copies the tensors of one ``_foreach_copy_`` one by one; a GPU does not.
    """
    out: list[dict[str, Any]] = []
    for event in sorted(filter(is_operation, events), key=lambda event: (event["tid"], event["ts"], -event["dur"])):
        if not out or event["tid"] != out[-1]["tid"] or event["ts"] >= out[-1]["ts"] + out[-1]["dur"]:
            out.append(event)
    return out


def is_operation(event: dict[str, Any]) -> bool:
    where, _, name = event["name"].partition("::")
    return event.get("cat") == "cpu_op" and where == "aten" and not NO_KERNEL.fullmatch(name)


def overlap(events: list[dict[str, Any]], *, cuda: bool) -> float:
    """Share of the time on other streams (on a CPU: threads) during which the busiest one works too."""
    tracks: dict[Any, list[Interval]] = {}
    for event in events:
        if cuda and event.get("cat") in ("kernel", "gpu_memcpy"):
            track = event["args"]["stream"]
        elif not cuda and event.get("cat") == "cpu_op":
            track = event["tid"]
        else:
            continue
        tracks.setdefault(track, []).append((event["ts"], event["ts"] + event["dur"]))
    if len(tracks) < 2:
        return 0.0
    busiest = max(tracks, key=lambda track: length(union(tracks[track])))
    compute = union(tracks.pop(busiest))
    others = union(interval for track in tracks.values() for interval in track)
    either = union([*compute, *others])
    return (length(compute) + length(others) - length(either)) / length(others)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint and in order."""
    out: list[Interval] = []
    for first, last in sorted(intervals):
        if out and first <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], last))
        else:
            out.append((first, last))
    return out


def length(intervals: Iterable[Interval]) -> float:
    return sum(last - first for first, last in intervals)
