"""Names what in a framework's checkpoint does not fit the model.

FSDP2's loaders fail on the first tensor, often with an error about broadcasting. This code looks only after they have
failed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from lowbit_strategy.model.parameters import canonical_name

Shapes = dict[str, tuple[int, ...]]


@contextlib.contextmanager
def explain_mismatch(path: Any, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """A context in which `path` is loaded. `modules`: by the name under which the checkpoint has their state.

    Raises:
        ValueError: Loading failed, and the checkpoint's parameters differ from a module's.
    """
    try:
        yield
    except (RuntimeError, KeyError, ValueError, CheckpointException) as error:
        for key, module in modules.items():
            if difference := _difference(_shapes(Path(path), key), module):
                raise ValueError(f"the checkpoint {path} belongs to another model: {difference}") from error
        raise


def _shapes(path: Path, key: str) -> Shapes | None:
    """Shapes under `key` in a full file or a folder of shards. None if there are none or the checkpoint cannot be read
    safely; then the framework's error is all there is.

    A checkpoint may come from anywhere, so nothing in it is ever executed to explain why it did not load.
    """
    with contextlib.suppress(Exception):  # damaged or hostile bytes fail in any of the ways of pickle
        if not path.is_dir():
            tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)[key]
            return {name: tuple(value.shape) for name, value in tensors.items() if isinstance(value, torch.Tensor)}
        entries = FileSystemReader(path).read_metadata().state_dict_metadata
        sizes = {name.removeprefix(f"{key}."): entry for name, entry in entries.items() if name.startswith(f"{key}.")}
        return {name: tuple(entry.size) for name, entry in sizes.items() if hasattr(entry, "size")} or None
    return None


def _difference(saved: Shapes | None, module: nn.Module) -> str:
    if saved is None:
        return ""
    held = {canonical_name(name): shape for name, shape in saved.items()}
    here = {canonical_name(name): tuple(value.shape) for name, value in module.state_dict().items()}
    parts = []
    for what, names in (("it lacks", here.keys() - held.keys()), ("the model lacks", held.keys() - here.keys())):
        if names:
            parts.append(f"{what} {', '.join(sorted(names)[:3])}{' ...' if len(names) > 3 else ''}")
    for name in [name for name, shape in here.items() if name in held and held[name] != shape][:3]:
        parts.append(f"{name} is {list(held[name])} in the checkpoint and {list(here[name])} in the model")
    return "; ".join(parts)
