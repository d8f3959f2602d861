"""What survives a restart: residuals, thresholds, counters, per rank, keyed by parameter name.

State is tensors, numbers, strings and dicts, so it loads with ``weights_only=True``. A parameter's tensors are saved
as they lie in memory (an exact copy when nothing has changed) with the numbers needed to read what they have not sent
yet in another layout, under another method or on another number of ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from lowbit_strategy.checkpoint.reshard import shared_state
from lowbit_strategy.collectives.layout import add_ranges_
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.method_state import sum_of_known
from lowbit_strategy.methods._base.method import unsent_part
from lowbit_strategy.methods._base.tensor_spec import MemoryOrder, in_memory_order
from lowbit_strategy.model.parts import local_part

FORMAT = 3
_SMALL_NBYTES = 1 << 20  # in page-locked memory, which is not given back to the system
OnWorldSizeChange = Literal["reset", "fold"]
Saved = dict[str, Any]

_log = logging.getLogger(__name__)


def capture(sync: GradientSync) -> Saved:
    """All state of this rank, on the CPU, detached from the engine's own. Between steps only."""
    sync.follow_phase()  # a new phase begins with the next step, and that is where a restored engine begins
    captured = {
        "format": FORMAT,
        "world_size": sync.ranks.world.world_size,
        "rank": sync.ranks.world.rank,
        "topology": _topology(sync),
        "step_index": sync.step_index,
        "num_skipped": sync.num_skipped,
        "loss_scale": sync.loss_scale,
        "parameters": {name: _capture_parameter(sync, name) for name in sync.specs},
        "extra": {name: part.state_dict() for name, part in sync.extra_state.items()},
        "own": {name: _on_cpu(part.state_dict()) for name, part in sync.rank_state.items()},
        "reduces": _reduced(sync),
    }
    check_last_step(sync)
    if sync.device.type == "cuda":
        torch.cuda.synchronize(sync.device)
    return captured


def check_last_step(sync: GradientSync) -> None:
    """Training ends, or is saved: look at what the host has not waited for yet.

    Raises:
        RuntimeError: A rank has sent a message of another layout in one of the last steps.
    """
    sync._flags.raise_if_broken(sync.ranks.rank, waits=True)
    if sync.weights is not None:
        sync.weights.flags.raise_if_broken(sync.ranks.rank, waits=True)


def _topology(sync: GradientSync) -> list[int]:
    """Ranks in all; how many reduce the same part together; how many parts there are, and of which kind. Of replicas
    that come and go each is by itself.
    """
    share, ranks = sync.ranks.share, sync.ranks
    parts = [1, 0] if share is None else [share.count, int(share.num_nodes is not None)]
    return [ranks.world.world_size, 1 if ranks.comes_and_goes else ranks.peers.world_size, *parts]


def _reduced(sync: GradientSync) -> str:
    """What residuals are in units of."""
    return "gradients" if sync.outer is None else "weights"


def _on_cpu(value: Any) -> Any:
    """A copy of nested plain data in the CPU's memory; of a sharded tensor, this rank's part.

    One copy and not two: of a large model there is room for one beside the weights'. Nothing waits for small ones: they
    arrive when the device has done all it had to.
    """
    if isinstance(value, Tensor):
        part = local_part(value.detach())
        return part.clone() if part.device.type == "cpu" else part.to("cpu", non_blocking=part.nbytes <= _SMALL_NBYTES)
    if isinstance(value, Mapping):
        return {key: _on_cpu(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on_cpu(each) for each in value)
    return value


def _capture_parameter(sync: GradientSync, name: str) -> Saved:
    leftover, spec = sync.state.carryover.get(name), sync.specs[name]
    return {
        "shape": list(spec.whole.shape),
        "ranges": None if spec.part is None else [list(run) for run in spec.part.ranges],
        "memory_order": spec.memory_order,
        "tensors": _on_cpu(sync.state.tensors(name)),
        "numbers": sync.state.store(name).numbers(name),
        "carryover": None if leftover is None else leftover.cpu(),
    }


def restore(
    sync: GradientSync,
    saved: Saved,
    *,
    load_rank: Callable[[int], Saved],
    on_world_size_change: OnWorldSizeChange,
) -> None:
    """Put saved state back.

    1. counters, controllers and other state beside the methods'
    2. on as many ranks: a parameter whose method and layout are those that were saved gets its state back exactly;
       any other gets what its old method had not sent yet
    3. on another number of ranks, or if they reduce other parts of parameters together: `on_world_size_change`

    Args:
        sync: The engine of the model that was saved; its compressor may have changed.
        saved: This rank's state, or any rank's if the world size has changed.
        load_rank: State of another rank of the run that saved, for folding.
        on_world_size_change: ``reset``: residuals start from zero; ``fold``: every rank gets the mean of what the saved
            ranks had not sent yet, so that nothing is lost.

    Raises:
        ValueError: The state is of another model or of an unknown format.
    """
    if saved.get("format") != FORMAT:
        raise ValueError(f"saved state has format {saved.get('format')!r}, this version reads {FORMAT}")
    _check_model(sync, saved)
    sync.restore_progress(
        step_index=saved["step_index"], num_skipped=saved["num_skipped"], loss_scale=saved["loss_scale"]
    )
    for name, part in sync.extra_state.items():
        if name in saved["extra"]:
            part.load_state_dict(saved["extra"][name])
    own, (_, _, count, interleaved) = saved["topology"] == _topology(sync), saved["topology"]
    num_shards = 1 if interleaved else count
    for name, rank_part in sync.rank_state.items():
        if name in saved["own"]:
            mine = saved["own"][name] if own else shared_state(sync, name, num_shards=num_shards, load_rank=load_rank)
            rank_part.load_state_dict(mine, own=own)
    sync.forget()
    if saved["reduces"] != _reduced(sync):
        if sync.ranks.rank == 0:
            _log.warning(
                "the checkpoint's residuals are of %s and this run reduces %s: residuals start from zero",
                saved["reduces"],
                _reduced(sync),
            )
        return
    if not own:
        _change_world_size(sync, saved, load_rank, on_world_size_change)
        return
    for name, entry in saved["parameters"].items():
        _restore_parameter(sync, name, entry)


def keep_fitting(sync: GradientSync, saved: Saved) -> bool:
    """Leave of `saved` what belongs to parameters that the model still has, in the same shape; what others have not
    sent yet is lost, which is said.

    Returns:
        Whether the model has the same parameters as before.
    """
    own = {name: list(spec.shape) for name, spec in sync.state.wholes.items()}
    shapes = {name: entry["shape"] for name, entry in saved["parameters"].items()}
    lost = [name for name, shape in shapes.items() if own.get(name) != shape]
    saved["parameters"] = {name: entry for name, entry in saved["parameters"].items() if name not in lost}
    if lost and sync.ranks.rank == 0:
        _log.warning(
            "the model has changed since compression was attached to it before: what is kept of %s%s starts anew",
            ", ".join(lost[:3]),
            " ..." if len(lost) > 3 else "",
        )
    return own == shapes


def _check_model(sync: GradientSync, saved: Saved) -> None:
    """What is trained here but was not when the state was saved starts from zero; anything else must fit."""
    own = {name: list(spec.shape) for name, spec in sync.state.wholes.items()}
    shapes = {name: entry["shape"] for name, entry in saved["parameters"].items()}
    unknown = sorted(shapes.keys() - own.keys())
    changed = sorted(name for name in own.keys() & shapes.keys() if own[name] != shapes[name])
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
    memory_order = sync.specs[name].memory_order
    same = entry["numbers"] == sync.state.store(name).numbers(name) and entry["memory_order"] == memory_order
    if same and _copy_into(sync.state.tensors(name), entry["tensors"]):
        if entry["carryover"] is not None:
            sync.state.carryover.keep(name, entry["carryover"])
    elif (unsent := _unsent(entry, memory_order)) is not None:
        _carry_over_(sync, name, unsent)


def _carry_over_(sync: GradientSync, name: str, whole_N: Tensor) -> None:
    """Make this rank's part of what was not sent of a parameter its residual."""
    part = sync.specs[name].part
    sync.state.carry_over_(name, (whole_N if part is None else part.take(whole_N)).to(sync.device))


def _unsent(entry: Saved, memory_order: MemoryOrder) -> Tensor | None:
    """What one saved rank had not sent yet of a whole parameter, in units of the gradient and in `memory_order`."""
    unsent = sum_of_known(unsent_part(entry["tensors"], entry["numbers"]), entry["carryover"])
    if unsent is None:
        return None
    if (ranges := entry["ranges"]) is not None:
        part, unsent = unsent, torch.zeros(math.prod(entry["shape"]), dtype=torch.float32)
        add_ranges_(unsent, ranges, part)
    return in_memory_order(unsent, entry["shape"], entry["memory_order"], memory_order)


def _change_world_size(
    sync: GradientSync, saved: Saved, load_rank: Callable[[int], Saved], policy: OnWorldSizeChange
) -> None:
    (old, num_together, *_), new = saved["topology"], sync.ranks.world.world_size
    if sync.ranks.rank == 0:
        what = "start from zero" if policy == "reset" else "are averaged over the old ranks"
        if old != new:
            _log.warning("the number of ranks changed from %d to %d: compression residuals %s", old, new, what)
        else:
            _log.warning("the ranks are grouped into nodes or replicas otherwise: compression residuals %s", what)
    if policy == "reset":
        return
    totals: dict[str, Tensor] = {}
    for rank in range(old):
        for name, entry in load_rank(rank)["parameters"].items():
            if (unsent := _unsent(entry, sync.specs[name].memory_order)) is not None:
                totals[name] = totals[name].add_(unsent) if name in totals else unsent.clone()
    for name, total in totals.items():
        _carry_over_(sync, name, total / num_together)
