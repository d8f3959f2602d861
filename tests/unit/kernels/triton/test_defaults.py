"""Every Triton kernel that default settings run, compiled for GPUs that are not there, of floats of every type.

LoCo at 4 bits, 8 bits for parameters of high precision, weights at 8 bits, exempt parameters as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from lowbit_strategy.kernels.format import BlockFormat, DenseFormat, uniform

pytest.importorskip("triton", reason="triton is not installed")

from lowbit_strategy.kernels.triton.layout import decode_launch, device_format, encode_launch
from testing.kernels import offline
from testing.kernels.offline import Resources

FOUR_PROGRAMS = 128  # registers that leave room for so many programs of 128 threads on a multiprocessor
EXACT = DenseFormat("float32")
KNOWN_SPILLS = {("loco 8", "float16", 100): 2}  # ptxas of Triton 3.9 keeps 8 bytes there, written and read once


def loco(fmt: BlockFormat, x: str, arch: int) -> Resources:
    launch = encode_launch(device_format(fmt), torch.int8)
    return offline.encode_resources(fmt, x=x, residual="int8", launch=launch, arch=arch)


def encode(fmt: BlockFormat, x: str, arch: int) -> Resources:
    return offline.encode_resources(fmt, x=x, launch=encode_launch(device_format(fmt)), arch=arch)


def decode(fmt: BlockFormat, out: str, arch: int, sources: int) -> Resources:
    launch = decode_launch(device_format(fmt))
    return offline.decode_sum_resources(fmt, out=out, sources=sources, launch=launch, arch=arch)


def kernels(x: str, arch: int) -> Iterator[tuple[str, Callable[[], Resources], int, int, float]]:
    """What, registers, shared memory in bytes, share of wide accesses.

    A thread reads or writes 16 codes at once. Where elements are spread over threads otherwise on the other side, that
    goes through some shared memory.
    """
    yield "loco 4", lambda: loco(uniform(4, 128), x, arch), FOUR_PROGRAMS, 0, 0.7
    yield "loco 8", lambda: loco(uniform(8, 128), x, arch), 80, 0, 0.7
    yield "encode 8", lambda: encode(uniform(8, 128), x, arch), 48, 2048, 0.7
    yield "decode 4 of 8", lambda: decode(uniform(4, 128), x, arch, 8), 96, 4096, 0.7
    yield "decode 8 of 8", lambda: decode(uniform(8, 128), x, arch, 8), 96, 4096, 0.7
    yield "decode 8 of 1", lambda: decode(uniform(8, 128), x, arch, 1), 48, 4096, 0.7
    yield "exact encode", lambda: offline.dense_encode_resources(EXACT, x=x, arch=arch), 40, 16, 0.5
    decoded = offline.dense_decode_sum_resources
    yield "exact decode", lambda: decoded(EXACT, out=x, sources=8, arch=arch), 48, 0, 0.5


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("x", ["bfloat16", "float32", "float16"])
def test_registers_spills_shared_memory_and_width(x: str, arch: int) -> None:
    wrong = []
    for name, compiled, registers, shared_nbytes, wide in kernels(x, arch):
        found = compiled()
        if found.num_spills > KNOWN_SPILLS.get((name, x, arch), 0) or found.local_nbytes:
            wrong.append(f"{name}: {found.num_spills} accesses to local memory")
        if found.registers > registers:
            wrong.append(f"{name}: {found.registers} registers, at most {registers}")
        if found.shared_nbytes > shared_nbytes:
            wrong.append(f"{name}: {found.shared_nbytes} bytes of shared memory, at most {shared_nbytes}")
        if found.wide_share < wide:
            wrong.append(f"{name}: {found.wide_share:.2f} of the bytes in wide accesses, at least {wide}")
    assert not wrong, "\n".join(wrong)
