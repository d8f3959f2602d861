"""The C path for CPUs: AVX-512, AVX2 or portable code, chosen at run time; `lowbit.h` describes its layout."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

ISA_OVERRIDE = "LOWBIT_ISA"  # avx512 | avx2 | portable: for tests, benchmarks, and to rule out a code path

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
