"""What survives a restart: residuals, thresholds, counters, per rank, keyed by parameter name.

State is tensors, numbers, strings and dicts, so it loads with ``weights_only=True``. A parameter's tensors are saved
as they lie in memory (an exact copy when nothing has changed) with the numbers needed to read them in another layout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from lowbit_strategy.engine.engine import GradientSync, residual_gain_of
from lowbit_strategy.methods._base.base import CodecPair
from lowbit_strategy.methods._base.stateful_codec import read_residual

FORMAT = 2
OnWorldSizeChange = Literal["reset", "fold"]
Saved = dict[str, Any]

_log = logging.getLogger(__name__)


def capture(sync: GradientSync) -> Saved:
    """All state of this rank, on the CPU, detached from the arenas. Between steps only."""
    sync.follow_phase()  # a new phase begins with the next step, and that is where a restored engine begins
    return {
        "format": FORMAT,
        "world_size": sync.comm.world_size,
        "rank": sync.comm.rank,
        "step_index": sync.step_index,
        "num_skipped": sync.num_skipped,
        "loss_scale": sync.loss_scale,
        "parameters": {name: _capture_parameter(sync, name) for name in sync.specs},
        "methods": {repr(method): _copy(state.get("", {})) for method, state in sync.reducers.items()},
        "extra": {name: part.state_dict() for name, part in sync.extra_state.items()},
    }


def _copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.detach().cpu().clone() for key, value in tensors.items()}


def _capture_parameter(sync: GradientSync, name: str) -> Saved:
    saved: Saved = {"shape": list(sync.specs[name].shape), "tensors": _copy(sync.tensors(name))}
    saved["residual_gain"] = residual_gain_of(sync.assignments[name].method)
    if (store := sync.codec_store(name)) is not None:
        saved["row_numel"] = store.cuts[name].row_numel
        saved["block_size"] = store.pair.uplink.block_size
        saved["downlink_residual_gain"] = residual_gain_of(store.pair, downlink=True)
    return saved


def restore(
    sync: GradientSync,
    saved: Saved,
    *,
    load_rank: Callable[[int], Saved],
    on_world_size_change: OnWorldSizeChange,
) -> None:
    """Put saved state back.

    Args:
        sync: The engine of the model that was saved; its compressor may have changed.
        saved: This rank's state, or any rank's if the world size has changed.
        load_rank: State of another rank of the run that saved, for folding.
        on_world_size_change: ``reset``: residuals start from zero; ``fold``: every rank gets the mean of the saved
            ranks' residuals, so that what was held back is still said.

    Raises:
        ValueError: The state is of another model or of an unknown format.
    """
    if saved.get("format") != FORMAT:
        raise ValueError(f"saved state has format {saved.get('format')!r}, this version reads {FORMAT}")
    _check_model(sync, saved)
    sync.step_index, sync.num_skipped = saved["step_index"], saved["num_skipped"]
    sync.loss_scale = saved["loss_scale"]
    sync.follow_phase()
    for name, part in sync.extra_state.items():
        if name in saved["extra"]:
            part.load_state_dict(saved["extra"][name])
    if saved["world_size"] != sync.comm.world_size:
        _change_world_size(sync, saved, load_rank, on_world_size_change)
        return
    for method, state in sync.reducers.items():
        _copy_into(state.get("", {}), saved["methods"].get(repr(method), {}))
    for name, entry in saved["parameters"].items():
        _restore_parameter(sync, name, entry)


def _check_model(sync: GradientSync, saved: Saved) -> None:
    """What is trained here but was not when the state was saved starts from zero; anything else must fit."""
    here = {name: list(spec.shape) for name, spec in sync.specs.items()}
    uplink = {name: entry["shape"] for name, entry in saved["parameters"].items()}
    unknown = sorted(uplink.keys() - here.keys())
    changed = sorted(name for name in here.keys() & uplink.keys() if here[name] != uplink[name])
    parts = [
        f"{what}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
        for what, names in (("not in the model", unknown), ("of another shape", changed))
        if names
    ]
    if parts:
        raise ValueError(
            f"the residuals beside the checkpoint are of another model ({'; '.join(parts)}): load the checkpoint into"
            ' the model that wrote it, or pass on_missing_residual="reset" to go on with residuals of zero'
        )


def _copy_into(targets: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> bool:
    """Copy if every tensor has its counterpart; nothing otherwise."""
    same = targets.keys() == saved.keys() and all(
        value.shape == saved[key].shape and value.dtype == saved[key].dtype for key, value in targets.items()
    )
    if same:
        for key, value in targets.items():
            value.copy_(saved[key])
    return same


def _restore_parameter(sync: GradientSync, name: str, entry: Saved) -> None:
    method = sync.assignments[name].method
    same_grid = not isinstance(method, CodecPair) or (
        entry.get("block_size") == method.uplink.block_size
        and entry.get("row_numel") == sync.codecs[method].cuts[name].row_numel
    )
    if same_grid and _copy_into(sync.tensors(name), entry["tensors"]):
        return
    carryover = _saved_residual(entry)  # another method or layout: what is owed passes to it
    if (owner := _saved_owner_residual(entry, sync.comm.rank)) is not None:
        carryover = torch.zeros(sync.specs[name].numel) if carryover is None else carryover
        start = sync.comm.rank * entry["row_numel"]
        carryover[start : start + owner.numel()] += sync.comm.world_size * owner  # the owner owes the mean
    if carryover is not None:
        sync.carry_over_(name, carryover.to(sync.device))


def _saved_residual(entry: Saved) -> Tensor | None:
    """What a saved parameter owed, in units of its gradient: float32 ``[numel]``; None if nothing kept it."""
    tensors, numel = entry["tensors"], torch.Size(entry["shape"]).numel()
    if "residual" in tensors:
        return tensors["residual"].float().view(-1) / entry["residual_gain"]
    uplink = {key.removeprefix("uplink."): value for key, value in tensors.items() if key.startswith("uplink.")}
    values = read_residual(uplink, entry.get("block_size", 1))
    if values is None:
        return None
    row_numel = entry["row_numel"]
    row_state = -(-row_numel // entry["block_size"]) * entry["block_size"]
    return values.view(-1, row_state)[:, :row_numel].reshape(-1)[:numel] / entry["residual_gain"]


def _saved_owner_residual(entry: Saved, rank: int) -> Tensor | None:
    downlink = {key.removeprefix("downlink."): value for key, value in entry["tensors"].items() if key.startswith("downlink.")}
    values = read_residual(downlink, entry.get("block_size", 1))
    if values is None:
        return None
    numel, row_numel = torch.Size(entry["shape"]).numel(), entry["row_numel"]
    return values[: max(0, min(row_numel, numel - rank * row_numel))] / entry["downlink_residual_gain"]


def _change_world_size(
    sync: GradientSync, saved: Saved, load_rank: Callable[[int], Saved], policy: OnWorldSizeChange
) -> None:
    old, new = saved["world_size"], sync.comm.world_size
    if sync.comm.rank == 0:
        what = "are forgotten" if policy == "reset" else "are averaged over the old ranks"
        _log.warning("world size changed from %d to %d: compression residuals %s", old, new, what)
    if policy == "reset":
        return
    totals: dict[str, Tensor] = {}
    owners: dict[str, list[Tensor]] = {}
    for rank in range(old):
        for name, entry in load_rank(rank)["parameters"].items():
            if (values := _saved_residual(entry)) is not None:
                totals[name] = totals[name] + values if name in totals else values.clone()
            if (values := _saved_owner_residual(entry, rank)) is not None:
                owners.setdefault(name, []).append(values)
    for name, total in totals.items():
        sync.carry_over_(name, (total / old).to(sync.device))
    for name, chunks in owners.items():
        if (store := sync.codec_store(name)) is not None:
            cut, residual_gain = store.cuts[name], residual_gain_of(store.pair, downlink=True)
            start = cut.row_numel * sync.comm.rank
            carryover = torch.cat(chunks)[start : start + cut.row_length(sync.comm.rank)]
            store.import_owner_residual_(name, residual_gain * carryover)
