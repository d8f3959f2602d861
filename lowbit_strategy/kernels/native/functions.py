"""The C functions that take plain pointers and numbers: those of sparse methods, and digests."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from lowbit_strategy.kernels.native import library

_POINTER, _COUNT, _INT32, _FLOAT, _NAME = (
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int32,
    ctypes.c_float,
    ctypes.c_char_p,
)
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "lowbit_select": (_COUNT, (_NAME, _POINTER, _COUNT, _COUNT, _FLOAT, _POINTER, _POINTER, _COUNT)),
    "lowbit_chunk_top_k": (None, (_NAME, _POINTER, _COUNT, _COUNT, _POINTER, _COUNT, _POINTER, _POINTER)),
    "lowbit_add_select": (
        _COUNT,
        (
            *(_NAME, _POINTER, _POINTER, _COUNT, _COUNT, _FLOAT, _POINTER, _POINTER, _COUNT),
            ctypes.POINTER(ctypes.c_int32),
        ),
    ),
    "lowbit_top_k": (
        _COUNT,
        (_NAME, _POINTER, _POINTER, _COUNT, _INT32, _INT32, _POINTER, _COUNT, _POINTER, _POINTER),
    ),
    "lowbit_sample_magnitudes": (None, (_POINTER, _POINTER, _COUNT, _COUNT, ctypes.c_uint32, _POINTER)),
    "lowbit_peak": (_FLOAT, (_NAME, _POINTER, _COUNT, _COUNT)),
    "lowbit_locate": (None, (*[_POINTER] * 4, _COUNT, _COUNT, _COUNT, *[_POINTER] * 4)),
    "lowbit_positions": (_INT32, (_POINTER, _POINTER, _POINTER, _COUNT, _POINTER, _COUNT, _POINTER)),
    "lowbit_add_entries": (None, (_POINTER, _POINTER, _POINTER, _POINTER, _COUNT, _FLOAT, _POINTER)),
    "lowbit_digest": (ctypes.c_uint64, (_NAME, _POINTER, _COUNT, _COUNT, _POINTER, _COUNT, ctypes.c_uint64)),
    "lowbit_take_out": (None, (_POINTER, _POINTER, _POINTER, _POINTER, _COUNT)),
}


@lru_cache
def function(name: str) -> Any:
    """Raises:
    RuntimeError: The extension is older than this file.
    """
    found = getattr(library(), name, None)
    if found is None:
        raise RuntimeError("the C extension was built from older sources: reinstall the package")
    found.restype, found.argtypes = _SIGNATURES[name]
    return found
