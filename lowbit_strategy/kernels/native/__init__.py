"""The C path for CPUs: AVX-512, AVX2 or portable code, chosen at run time; `lowbit.h` describes its layout."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, TypeVar

import torch

ISA_OVERRIDE = "LOWBIT_ISA"  # avx512 | avx2 | portable: for tests and benchmarks, and to rule a code path out in a hunt

_ABI = 8  # LOWBIT_ABI in lowbit.h
_EXTENSION = "lowbit_strategy.kernels.native._lowbit"


@lru_cache(maxsize=1)
def available() -> bool:
    """Whether the C extension was built; without it, plain PyTorch is used."""
    return find_spec(_EXTENSION) is not None


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The extension's library. Its functions are called through ctypes, which releases the interpreter lock.

    Raises:
        RuntimeError: The extension was not built, or was built from other sources.
    """
    spec = find_spec(_EXTENSION)
    if spec is None or spec.origin is None:
        raise RuntimeError("the C extension is not built: reinstall with a C compiler")
    lib = ctypes.CDLL(spec.origin)
    if not hasattr(lib, "lowbit_abi") or lib.lowbit_abi() != _ABI:
        raise RuntimeError(
            f"{spec.origin} was built from other sources: reinstall, or run setup.py build_ext --inplace"
        )
    lib.lowbit_isa.restype, lib.lowbit_isa.argtypes = ctypes.c_char_p, (ctypes.c_int,)
    lib.lowbit_find.restype, lib.lowbit_find.argtypes = ctypes.c_void_p, (ctypes.c_char_p,)
    return lib


@lru_cache(maxsize=1)
def isas() -> tuple[str, ...]:
    """Instruction sets that this processor and this build have, fastest first."""
    names, index = [], 0
    while (name := library().lowbit_isa(index)) is not None:
        names.append(name.decode())
        index += 1
    return tuple(names)


def isa() -> str:
    """The instruction set in use.

    Raises:
        RuntimeError: The environment asks for one that is not available.
    """
    return _isa_for(os.environ.get(ISA_OVERRIDE))


@lru_cache
def _isa_for(asked: str | None) -> str:
    if asked is None:
        return isas()[0]
    if asked not in isas():
        raise RuntimeError(f"{ISA_OVERRIDE}={asked!r} is not one of {', '.join(isas())}")
    return asked


@lru_cache
def kernels_for(asked: str | None) -> int:
    """Handle of the kernels of the instruction set that the environment asks for, or of the fastest."""
    handle = library().lowbit_find(_isa_for(asked).encode())
    assert handle is not None, asked
    return int(handle)


# A tensor is passed as its `data_ptr()`: the caller keeps it alive.
_COUNT, _INT32, _FLOAT, _NAME = ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_char_p
_POINTER = ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "lowbit_encode": (_INT32, (_POINTER, _POINTER, _COUNT, _COUNT)),
    "lowbit_decode_sum": (None, (_POINTER, _POINTER, _COUNT, _COUNT)),
    "lowbit_select": (_COUNT, (_NAME, _POINTER, _COUNT, _COUNT, _FLOAT, _POINTER, _POINTER, _COUNT)),
    "lowbit_chunk_top_k": (None, (_NAME, _POINTER, _COUNT, _COUNT, _POINTER, _COUNT, _POINTER, _POINTER)),
    "lowbit_add_select": (
        _COUNT,
        (_NAME, _POINTER, _POINTER, _COUNT, _COUNT, _FLOAT, _POINTER, _POINTER, _COUNT, ctypes.POINTER(ctypes.c_int32)),
    ),
    "lowbit_top_k": (_COUNT, (_NAME, _POINTER, _POINTER, _COUNT, _INT32, _INT32, _POINTER, _COUNT, _POINTER, _POINTER)),
    "lowbit_sample_magnitudes": (None, (_POINTER, _POINTER, _COUNT, _COUNT, ctypes.c_uint32, _POINTER)),
    "lowbit_peak": (_FLOAT, (_NAME, _POINTER, _COUNT, _COUNT)),
    "lowbit_locate": (None, (_POINTER, _POINTER, _POINTER, _POINTER, _COUNT, _COUNT, _COUNT, *[_POINTER] * 4)),
    "lowbit_positions": (_INT32, (_POINTER, _POINTER, _POINTER, _COUNT, _POINTER, _COUNT, _POINTER)),
    "lowbit_add_entries": (None, (_POINTER, _POINTER, _POINTER, _POINTER, _COUNT, _FLOAT, _POINTER)),
    "lowbit_digest": (ctypes.c_uint64, (_NAME, _POINTER, _COUNT, _COUNT, _POINTER, _COUNT, ctypes.c_uint64)),
    "lowbit_take_out": (None, (_POINTER, _POINTER, _POINTER, _POINTER, _COUNT)),
}


@lru_cache
def function(name: str) -> Any:
    """A C function by its name.

    Raises:
        RuntimeError: The extension is older than this file.
    """
    found = getattr(library(), name, None)
    if found is None:
        raise RuntimeError("the C extension was built from older sources: reinstall the package")
    found.restype, found.argtypes = _SIGNATURES[name]
    return found


# -- threads: a call's blocks are split over torch's number of threads. They are independent: the bytes are the same --

GRAIN = 65536  # elements a thread must have for handing over to it to pay
_PART = 4096
_T = TypeVar("_T")
_pools: dict[int, ThreadPoolExecutor] = {}

os.register_at_fork(after_in_child=_pools.clear)  # a child has none of the parent's threads


def _pool(num_threads: int) -> ThreadPoolExecutor:
    if num_threads not in _pools:
        _pools[num_threads] = ThreadPoolExecutor(num_threads, thread_name_prefix="lowbit")
    return _pools[num_threads]


def run(work: Callable[[int, int], _T], num_blocks: int, block_size: int) -> list[_T]:
    """``work(first, last)`` over parts of ``range(num_blocks)``, one in this thread and the others in more.

    After an error or an interrupt, no other thread works on the call, so the caller owns its tensors again.
    """
    parts = max(1, min(torch.get_num_threads(), num_blocks * block_size // GRAIN))
    if parts == 1:
        return [work(0, num_blocks)]
    bounds = [num_blocks * part // parts for part in range(parts + 1)]
    pool, others = _pool(parts - 1), [Future[_T]() for _ in range(1, parts)]
    try:
        for other, (first, last) in zip(others, pairwise(bounds[1:]), strict=True):
            pool.submit(_fulfill, other, work, first, last)
        return [work(*bounds[:2]), *(other.result() for other in others)]
    except BaseException:
        wait([other for other in others if not other.cancel()])
        raise


def _fulfill(part: Future[_T], work: Callable[[int, int], _T], first: int, last: int) -> None:
    """`submit` can raise and leave its job in the queue: `part`, made before, is what such a job is called off by."""
    if part.set_running_or_notify_cancel():
        try:
            part.set_result(work(first, last))
        except BaseException as error:
            part.set_exception(error)


def run_on_elements(work: Callable[[int, int], _T], numel: int) -> list[_T]:
    """``work(start, stop)`` over parts of ``range(numel)`` that start on multiples of 4,096."""
    return run(lambda first, last: work(first * _PART, min(last * _PART, numel)), -(-numel // _PART), _PART)
