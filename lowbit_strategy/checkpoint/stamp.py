"""What a checkpoint holds of the residual files beside it, and the ranks' agreement on it.

A stamp is plain data, so that it fits into a checkpoint of any framework and into JSON:

| key | what |
|---|---|
| `step_index`, `world_size` | of the run that saved |
| `parameters` | names of all parameters that residuals were kept for |
| `checksums` | of every rank's file, in rank order |
"""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist

from lowbit_strategy.checkpoint.residual_files import ADVICE, Place, ResidualFileError
from lowbit_strategy.collectives.comm import gathered
from lowbit_strategy.collectives.lost_ranks import naming_lost_ranks

Stamp = dict[str, Any]
_KINDS = {"step_index": int, "world_size": int, "parameters": list, "checksums": list}


def gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's `value`, in rank order."""
    with naming_lost_ranks(group, "agreeing on a checkpoint's residual files", ""):
        return gathered(value, group)


def first_problem(problems: list[str | None]) -> str | None:
    """The first rank's that has one, with its number."""
    return next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None), None)


def place_of(stamp: Stamp, rank: int) -> Place:
    return Place(stamp["step_index"], rank, stamp["world_size"], stamp["checksums"][rank])


def agree_on_stamp(path: Any, stamp: Stamp | ResidualFileError | None, group: dist.ProcessGroup | None) -> Stamp | None:
    """The stamp that all ranks have found; None if none has.

    Args:
        path: The checkpoint.
        stamp: What this rank has found in it, or why it cannot be read.
        group: All ranks.

    Raises:
        ResidualFileError: On every rank, if a rank has found another stamp than rank 0, or one that cannot be used.
    """
    found = str(stamp) if isinstance(stamp, ResidualFileError) else _problem(path, stamp)
    everyone = gather((found, json.dumps(stamp, sort_keys=True, default=str)), group)
    problem = first_problem([text for text, _ in everyone])
    if problem is None:
        texts = [text for _, text in everyone]
        other = next((rank for rank, text in enumerate(texts) if text != texts[0]), None)
        if other is not None:
            problem = (
                f"rank {other} finds another record of residuals in {path} than rank 0: the checkpoint must be the"
                f" same on all machines; {ADVICE}"
            )
    if problem is not None:
        raise ResidualFileError(problem)
    assert not isinstance(stamp, ResidualFileError)
    return stamp


def _problem(path: Any, stamp: Any) -> str | None:
    """Why a stamp cannot be used."""
    if stamp is None:
        return None
    if not isinstance(stamp, dict):
        return f"what {path} records of its residual files cannot be read (it is a {type(stamp).__name__}): {ADVICE}"
    if lacking := [key for key, kind in _KINDS.items() if not isinstance(stamp.get(key), kind)]:
        return (
            f"{path} records no {lacking[0]} of its residual files: another version of this package wrote it. Load it"
            f" with that version; otherwise {ADVICE}"
        )
    if stamp["world_size"] < 1 or stamp["step_index"] < 0:
        return (
            f"{path} records residual files of {stamp['world_size']} ranks at step {stamp['step_index']}, which no run"
            f" has saved: {ADVICE}"
        )
    if len(stamp["checksums"]) != stamp["world_size"]:
        return f"{path} records {len(stamp['checksums'])} residual files for {stamp['world_size']} ranks: {ADVICE}"
    return None
