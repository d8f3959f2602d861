"""Helps to load a framework's checkpoint: names what does not fit the model, and handles optimizers without state.

FSDP2's loaders fail on the first tensor, often with an error about broadcasting. This code looks only after they have
failed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict as torch_state_dict
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from lowbit_strategy.model.parameters import canonical_name

Shapes = dict[str, tuple[int, ...]]
_LOAD = "_load_checkpoint"
_REKEY = "_rekey_optimizer_state_if_needed"


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


@contextlib.contextmanager
def optimizers_without_state(strategy: object) -> Iterator[None]:
    """Let `strategy` load an optimizer that has no state, such as SGD without momentum.

    Lightning 2.6.6 looks at the first entry of the saved state to see whether its keys are numbers, and torch 2.13
    takes its device from an entry. Both fail if there is none. Such an optimizer needs only its groups' options.
    """
    methods = [cls.__dict__["load_checkpoint"] for cls in type(strategy).__mro__ if "load_checkpoint" in cls.__dict__]
    stock = next((m.__globals__[_LOAD] for m in methods if _LOAD in m.__globals__), None)
    names = {} if stock is None else stock.__globals__
    if _REKEY not in names:  # another version, which does it in another way
        yield
        return
    rekey, set_state = names[_REKEY], torch_state_dict.set_optimizer_state_dict

    def rekey_if_any(saved: dict[str, Any], module: nn.Module) -> dict[str, Any]:
        return rekey(saved, module) if saved["state"] else saved

    def set_state_if_any(model: nn.Module, optimizer: Optimizer, *, optim_state_dict: Any, **options: Any) -> None:
        if optim_state_dict.get("state", True):
            set_state(model, optimizer, optim_state_dict=optim_state_dict, **options)
            return
        for group, saved in zip(optimizer.param_groups, optim_state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})

    names[_REKEY], torch_state_dict.set_optimizer_state_dict = rekey_if_any, set_state_if_any  # type: ignore[assignment]
    try:
        yield
    finally:
        names[_REKEY], torch_state_dict.set_optimizer_state_dict = rekey, set_state
