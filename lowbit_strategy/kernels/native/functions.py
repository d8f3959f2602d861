"""The C functions, by name, and what they take."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from torch import Tensor

from lowbit_strategy.kernels.native import library

_as_pointer = ctypes.c_void_p.from_param


class _Tensor:
    """A pointer argument that a tensor is given for, or None."""

    @staticmethod
    def from_param(x: Tensor | None) -> Any:
        return _as_pointer(None if x is None else x.data_ptr())


_COUNT, _INT32, _FLOAT, _NAME = ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_char_p
_POINTER = ctypes.c_void_p  # to something else
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "lowbit_encode": (_INT32, (_POINTER, _POINTER, _COUNT, _COUNT)),
    "lowbit_decode_sum": (None, (_POINTER, _POINTER, _COUNT, _COUNT)),
    "lowbit_select": (_COUNT, (_NAME, _Tensor, _COUNT, _COUNT, _FLOAT, _Tensor, _Tensor, _COUNT)),
    "lowbit_chunk_top_k": (None, (_NAME, _Tensor, _COUNT, _COUNT, _Tensor, _COUNT, _Tensor, _Tensor)),
    "lowbit_add_select": (
        _COUNT,
        (_NAME, _Tensor, _Tensor, _COUNT, _COUNT, _FLOAT, _Tensor, _Tensor, _COUNT, ctypes.POINTER(ctypes.c_int32)),
    ),
    "lowbit_top_k": (_COUNT, (_NAME, _Tensor, _Tensor, _COUNT, _INT32, _INT32, _Tensor, _COUNT, _Tensor, _Tensor)),
    "lowbit_sample_magnitudes": (None, (_Tensor, _Tensor, _COUNT, _COUNT, ctypes.c_uint32, _Tensor)),
    "lowbit_peak": (_FLOAT, (_NAME, _Tensor, _COUNT, _COUNT)),
    "lowbit_locate": (None, (_Tensor, _POINTER, _Tensor, _Tensor, _COUNT, _COUNT, _COUNT, *[_Tensor] * 4)),
    "lowbit_positions": (_INT32, (_Tensor, _Tensor, _Tensor, _COUNT, _Tensor, _COUNT, _Tensor)),
    "lowbit_add_entries": (None, (_Tensor, _POINTER, _POINTER, _POINTER, _COUNT, _FLOAT, _Tensor)),
    "lowbit_digest": (ctypes.c_uint64, (_NAME, _Tensor, _COUNT, _COUNT, _Tensor, _COUNT, ctypes.c_uint64)),
    "lowbit_take_out": (None, (_Tensor, _Tensor, _Tensor, _Tensor, _COUNT)),
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
