"""The code that the host runs for CUDA tensors, without a GPU: tensors that say they are on ``cuda:0`` and are empty.

Kernel launches are noted instead of done; everything around them is the real code, on its CUDA branches. Whatever would
make the host wait for the device is an error.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from lowbit_strategy.kernels.segments import Segments
from lowbit_strategy.kernels.triton import blocks, dense
from lowbit_strategy.kernels.triton.tiles import Tiles

CUDA = torch.device("cuda", 0)
_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
_CUDA_TYPE, _META_TYPE = 1, 14  # of c10::DeviceType
_READS = ("_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "is_nonzero", "equal", "tolist")


class HostWaits(AssertionError):
    """The host would wait for the device."""


class NoHostSync(TorchDispatchMode):
    """Refuses reading values on the host, results of unknown size, and copies that wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        on_device = any(isinstance(arg, Tensor) and arg.device.type == "cuda" for arg in args)
        if on_device and name in _READS:
            raise HostWaits(f"{func} reads the device")
        if name in ("index", "index_put", "index_put_") and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        ):
            raise HostWaits(f"{func} with a mask has a result of unknown size")
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            raise HostWaits(f"{func} has a result of unknown size")
        if name in ("_to_copy", "copy_"):
            self._check_copy(name, args, kwargs)
        return func(*args, **kwargs)

    def _check_copy(self, name: str, args: Any, kwargs: Any) -> None:
        if name == "copy_":
            source, target = args[1].device, args[0].device
            waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        else:
            source, target = args[0].device, torch.device(kwargs.get("device") or args[0].device)
            waits = not kwargs.get("non_blocking", False)
        if waits and {source.type, target.type} == {"cpu", "cuda"}:
            raise HostWaits(f"a copy from {source} to {target} that the host waits for")


def _guard_cuda_devices() -> None:
    """A build of torch without CUDA has no device guard for it, which some methods of a tensor enter before anything
    else: lend it the one of meta tensors, which does nothing.
    """
    if torch.cuda.is_available():
        return
    folder = Path(torch.__file__).parent / "lib"
    registry = (ctypes.c_void_p * 16).in_dll(ctypes.CDLL(str(folder / "libc10.so")), _GUARDS)
    registry[_CUDA_TYPE] = registry[_META_TYPE]


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorded = False

    def record(self) -> None:
        self._recorded = True

    def query(self) -> bool:
        return False  # not yet: the device is behind


@contextmanager
def on_cuda() -> Iterator[list[str]]:
    """Inside, tensors can be made on `CUDA`. Gives the names of the kernels that are launched."""
    launched: list[str] = []

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launched.append(kernel.fn.__name__)

    def tiles_of(segments: Segments, fmt: Any, tile: int, device: torch.device) -> Tiles:
        def tiles() -> Tiles:
            count = sum(-(-row.numel // tile) for row in segments.rows)
            return Tiles(count, torch.empty(count, device=device), torch.empty(7, device=device))

        return segments.kept(("tiles", tile, fmt), tiles)

    zeros = torch.zeros

    def zeros_anywhere(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return zeros(*args, **kwargs)

    _guard_cuda_devices()
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(patch.object(JITFunction, "run", run))
        stack.enter_context(patch.object(FakeTensor, "data_ptr", lambda x: 256 + x.storage_offset() * x.itemsize))
        stack.enter_context(patch("torch.cuda.device", lambda device: nullcontext()))
        stack.enter_context(patch("torch.cuda.Event", _Event))
        stack.enter_context(patch("torch.zeros", zeros_anywhere))
        for module in (blocks, dense):
            stack.enter_context(patch.object(module, "tiles_of", tiles_of))
        yield launched
