"""Compile the kernels for a GPU that is not there, and read what they need: registers, spills, shared memory."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from lowbit_strategy.kernels.format import BlockFormat, DenseFormat
from lowbit_strategy.kernels.triton import dense
from lowbit_strategy.kernels.triton.blocks import decode_sum_kernel, loops_of
from lowbit_strategy.kernels.triton.encode import encode_kernel
from lowbit_strategy.kernels.triton.layout import How, Launch, device_format
from lowbit_strategy.methods.zoo.kernels.chunk_top_k import CHUNK_NUMEL
from lowbit_strategy.methods.zoo.kernels.triton import rotation
from lowbit_strategy.methods.zoo.kernels.triton.chunk_top_k import NUM_WARPS, chunk_top_k_kernel

_POINTERS = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16", "int8": "*i8"}
_ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """What one compiled kernel needs.

    Args:
        registers: 32-bit registers of a thread.
        stack_nbytes, local_nbytes: Memory of a thread beyond its registers; anything but 0 is a spill.
        shared_nbytes: Shared memory of a program.
        threads: Threads of a program.
        ptx, sass: The code.
    """

    registers: int
    stack_nbytes: int
    local_nbytes: int
    shared_nbytes: int
    threads: int
    ptx: str
    sass: str

    @property
    def instructions(self) -> int:
        """Machine instructions of all paths together."""
        return len(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+\S", self.sass, re.MULTILINE))

    def executed(self, turns: Sequence[int] = ()) -> Counter[str]:
        """Machine instructions that a thread runs to its end by name, each loop as often as `turns` says, in order."""
        places: dict[str, int] = {}
        loops: list[range] = []
        names: list[str] = []
        end = 0
        for line in self.sass.splitlines():
            if label := re.match(r"(\.L_x_\d+):", line):
                places[label[1]] = len(names)
            elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\w+)", line):
                back = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)
                if back and back[1] in places and places[back[1]] < len(names):
                    loops.append(range(places[back[1]], len(names) + 1))
                names.append(found[1])
                end = len(names) if found[1] == "EXIT" else end
        if len(loops) != len(turns):
            raise ValueError(f"the code has {len(loops)} loops, turns are given for {len(turns)}")
        counts = Counter(names[:end])
        for loop, num in zip(sorted(loops, key=lambda loop: loop.start), turns, strict=True):
            for name in names[loop.start : loop.stop]:
                counts[name] += num - 1
        return counts

    @property
    def num_spills(self) -> int:
        """Instructions that read or write local memory. A stack that none of them touches costs nothing."""
        return len(re.findall(r"\b(?:STL|LDL)\b", self.sass))

    @property
    def wide_share(self) -> float:
        """Of the bytes that all global loads and stores of the code move, each done once, what is moved by those of at
        least 8 bytes per thread. Tiles with a tail have a path of their own, which is narrow.
        """
        accesses = re.findall(r"\b(?:LDG|STG)\.([A-Z0-9.]*)", self.sass)
        sizes = [next((size for name, size in _WIDTHS if name in access.split(".")), 4) for access in accesses]
        return sum(size for size in sizes if size >= 8) / max(1, sum(sizes))


_WIDTHS = (("128", 16), ("64", 8), ("U8", 1), ("S8", 1), ("U16", 2), ("S16", 2))  # bytes; else 4


def encode_resources(
    fmt: BlockFormat,
    *,
    x: str,
    launch: Launch,
    arch: int,
    residual: str | None = None,
    stochastic: bool = False,
    stochastic_residual: bool = False,
) -> Resources:
    constants = _constants(fmt, launch)
    constants["how"] = How(stochastic, stochastic_residual)
    if residual is None:
        constants["residual"] = None
    if residual != "int8":
        constants["residual_scale"] = None
    types = {"x": _POINTERS[x], "residual": _POINTERS.get(residual or "")}
    return _compile(encode_kernel, types, constants, launch, arch)


def decode_sum_resources(fmt: BlockFormat, *, out: str, sources: int, launch: Launch, arch: int) -> Resources:
    unrolled = loops_of(sources).unrolled
    constants = {**_constants(fmt, launch), "UNROLLED": unrolled}
    return _compile(decode_sum_kernel, {"out": _POINTERS[out]}, constants, launch, arch)


def dense_encode_resources(fmt: DenseFormat, *, x: str, arch: int) -> Resources:
    return _compile(dense.encode_kernel, {"x": _POINTERS[x]}, _dense_constants(fmt), dense.LAUNCH, arch)


def dense_decode_sum_resources(fmt: DenseFormat, *, out: str, sources: int, arch: int) -> Resources:
    constants = {**_dense_constants(fmt), "UNROLLED": loops_of(sources).unrolled}
    return _compile(dense.decode_sum_kernel, {"out": _POINTERS[out]}, constants, dense.LAUNCH, arch)


def chunk_top_k_resources(*, arch: int) -> Resources:
    types = {"x": "*fp32", "positions": "*i16", "values": "*fp32", "kept": "*i32", "room": "i32"}
    launch = Launch(elements_per_thread=CHUNK_NUMEL // (32 * NUM_WARPS), num_warps=NUM_WARPS, vector=4)
    return _compile(chunk_top_k_kernel, types, {"CHUNK": CHUNK_NUMEL}, launch, arch)


def rotate_resources(size: int, *, inverse: bool, arch: int) -> Resources:
    types = {"x": "*fp32", "out": "*fp32", "signs": "*fp32", "num_rows": "i32", "scale": "fp32"}
    constants = {"SIZE": size, "STAGES": size.bit_length() - 1, "ROWS": rotation.LAUNCH.tile(size) // size}
    return _compile(rotation.rotate_kernel, types, constants | {"INVERSE": inverse}, rotation.LAUNCH, arch)


_TYPES = {  # of arguments that have the same one in all kernels
    **dict.fromkeys(("segment_of_tile", "flag"), "*i32"),
    **dict.fromkeys(("beta_old", "beta_new", "alpha"), "fp32"),
    **dict.fromkeys(("reset", "seed", "groups", "singles"), "i32"),
    "residual_scale": "*bf16",
    "segments": "*i64",
    "stride": "i64",
    "wire": "*u8",
}


def _constants(fmt: BlockFormat, launch: Launch) -> dict[str, Any]:
    device = device_format(fmt)
    return {"fmt": device, **dict(zip(("shape", "small"), launch.shapes(device), strict=True))}


def _dense_constants(fmt: DenseFormat) -> dict[str, Any]:
    return {"NARROW": fmt.code_nbytes == 2, "SIZE": dense.LAUNCH.tile(fmt.block_size)}


_condition = "is_plain"  # what kernels ask to know whether a tile is whole and aligned


@contextlib.contextmanager
def whole_tiles() -> Iterator[None]:
    """Kernels that are compiled inside have the way of whole, aligned tiles alone, which nearly all programs take."""
    with patch.object(sys.modules[__name__], "_condition", "True"):
        yield


def _fresh(kernel: Any) -> Any:
    """The same kernel, which looks its functions up again."""
    alignment = [param.name for param in kernel.params if param.do_not_specialize_on_alignment]
    plain = [param.name for param in kernel.params if param.do_not_specialize]
    fresh = triton.jit(kernel.fn, do_not_specialize=plain, do_not_specialize_on_alignment=alignment)
    assert ("is_plain" in fresh.src) == ("if is_plain:" in fresh.src), f"{kernel.fn.__name__} asks in another way"
    fresh._unsafe_update_src(fresh.src.replace("if is_plain:", f"if {_condition}:"))
    return fresh


def _compile(kernel: Any, types: dict[str, Any], constants: dict[str, Any], launch: Launch, arch: int) -> Resources:
    """`types`: of the arguments that are not in `_TYPES`."""
    types, kernel = _TYPES | types | dict.fromkeys(constants, "constexpr"), _fresh(kernel)
    types = {param.name: types[param.name] for param in kernel.params}
    attrs = {
        (i,): _ALIGNED
        for i, param in enumerate(kernel.params)
        if (types[param.name].startswith("*") and not param.do_not_specialize_on_alignment) or param.name == "stride"
    }
    source = ASTSource(kernel, signature=types, constexprs=constants, attrs=attrs)
    target = GPUTarget("cuda", arch, 32)
    with patch.object(driver, "_active", SimpleNamespace(get_current_target=lambda: target)):  # which kernels ask
        compiled = triton.compile(source, target=target, options=launch.options())
    usage, sass = _inspect(compiled.asm["cubin"])
    figures = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    return Resources(
        registers=figures["REG"],
        stack_nbytes=figures["STACK"],
        local_nbytes=figures["LOCAL"],
        shared_nbytes=compiled.metadata.shared,
        threads=launch.num_warps * 32,
        ptx=compiled.asm["ptx"],
        sass=sass,
    )


def _inspect(cubin: bytes) -> tuple[str, str]:
    """Resource usage and disassembly, by the tools that come with Triton."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        Path(path).write_bytes(cubin)
        return tuple(
            subprocess.run([str(tools / tool), *options, path], check=True, capture_output=True, text=True).stdout
            for tool, *options in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )  # type: ignore[return-value]
