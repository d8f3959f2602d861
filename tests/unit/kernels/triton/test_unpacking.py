"""The assembly, which Triton's interpreter does not run: each instruction in NumPy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

pytest.importorskip("triton", reason="triton is not installed")

from lowbit_strategy.kernels.format import E2M1
from lowbit_strategy.kernels.triton import bits, packing, quantize, unpacking

VALUES = np.array([*(-value for value in reversed(E2M1)), 0.0, *E2M1], dtype=np.float32)


def prmt(low: np.ndarray, high: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Four bytes, each one of eight by three bits of the selector; its sign, repeated, where the fourth bit is set."""
    source = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(selector)
    for i in range(4):
        index = selector >> np.uint32(4 * i) & np.uint32(15)
        byte = (source >> (np.uint64(8) * (index & 7)) & np.uint64(255)).astype(np.uint32)
        byte = np.where(index > 7, (byte >> 7) * np.uint32(255), byte)
        result |= byte << np.uint32(8 * i)
    return result


def e2m1_as_float16(nibble: np.ndarray) -> np.ndarray:
    """Bits of its value: one bit of sign, two of the exponent, whose bias is 1, one of the significand."""
    exponent, significand = (nibble >> 1 & 3).astype(np.int32), (nibble & 1).astype(np.float32)
    magnitude = np.where(exponent > 0, np.ldexp(1 + significand / 2, exponent - 1), significand / 2)
    return np.where(nibble & 8, -magnitude, magnitude).astype(np.float16).view(np.uint16).astype(np.uint32)


def half(word: np.ndarray, i: int) -> np.ndarray:
    """The lower or the upper one of two bfloat16, as float32."""
    return (word >> np.uint32(16 * i) << np.uint32(16)).view(np.float32)


def as_bfloat16(x: np.ndarray) -> np.ndarray:
    """Bits of what is a bfloat16 already."""
    bits = x.view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return bits >> np.uint32(16)


def run(text: str, operands: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What is in every register and operand at the end."""
    held, size = dict(operands), next(iter(operands.values())).size

    def read(name: str) -> np.ndarray:
        return held[name] if name in held else np.full(size, int(name, 0), dtype=np.uint32)

    for line in text.strip("{} \n").split(";"):
        operation, _, rest = line.strip().partition(" ")
        match operation, [part.strip(" {}") for part in rest.split(",")]:
            case ("" | ".reg", _):
                pass
            case "xor.b32", [out, a, b]:
                held[out] = read(a) ^ read(b)
            case "and.b32", [out, a, b]:
                held[out] = read(a) & read(b)
            case "not.b32", [out, a]:
                held[out] = ~read(a)
            case "add.u32" | "add.s32", [out, a, b]:
                held[out] = read(a) + read(b)
            case "mul.lo.u32", [out, a, b]:
                held[out] = read(a) * read(b)
            case "max.s32", [out, a, b]:
                held[out] = np.maximum(read(a).view(np.int32), read(b).view(np.int32)).view(np.uint32)
            case "sub.u32", [out, a, b]:
                held[out] = read(a) - read(b)
            case "shr.u32", [out, a, b]:
                held[out] = read(a) >> read(b)
            case "mad.lo.u32", [out, a, b, c]:
                held[out] = read(a) * read(b) + read(c)
            case "bfe.s32", [out, a, start, length]:
                held[out] = (read(a) << (32 - read(start) - read(length))).view(np.int32) >> (32 - int(length))
            case "cvt.rn.f32.s32", [out, a]:
                held[out] = held[a].astype(np.float32)
            case "cvt.rni.s32.f32", [out, a]:
                held[out] = np.rint(held[a]).astype(np.int32)
            case "cvt.pack.sat.s8.s32.b32", [out, high, low, below]:
                pair = [np.clip(held[name], -128, 127).astype(np.uint32) & 255 for name in (low, high)]
                held[out] = pair[0] | pair[1] << np.uint32(8) | read(below) << np.uint32(16)
            case "cvt.rn.bf16x2.f32", [out, high, low]:
                bits = [as_bfloat16(held[name]) for name in (low, high)]
                held[out] = bits[0] | bits[1] << np.uint32(16)
            case "fma.rn.bf16x2", [out, a, b, c]:
                found = [np.float64(half(read(a), i)) * half(read(b), i) + half(read(c), i) for i in range(2)]
                bits = [as_bfloat16(each.astype(np.float32)) for each in found]
                held[out] = bits[0] | bits[1] << np.uint32(16)
            case "prmt.b32", [out, a, b, selector]:
                held[out] = prmt(read(a), read(b), read(selector))
            case "mov.b32", [out, a]:
                held[out] = read(a)
            case "mov.b32", [low, high, a]:
                held[low], held[high] = (part.astype(np.uint16) for part in (read(a) & 0xFFFF, read(a) >> 16))
            case "mov.b32", [*bytes_, a]:
                held |= {name: read(a) >> np.uint32(8 * i) & np.uint32(255) for i, name in enumerate(bytes_)}
            case "cvt.rn.f16x2.e2m1x2", [out, a]:
                low, high = (e2m1_as_float16(held[a] >> np.uint32(at)) for at in (0, 4))
                held[out] = low | high << np.uint32(16)
            case "cvt.f32.f16", [out, a]:
                held[out] = held[a].view(np.float16).astype(np.float32)
            case _:
                raise AssertionError(f"{line!r} is no instruction that this test knows")
    return held


CODES = np.array([(*four, *reversed(four)) for four in itertools.product(range(15), repeat=4)], dtype=np.uint32)
WORDS = (CODES << np.arange(0, 32, 4, dtype=np.uint32)).sum(1, dtype=np.uint32)


def test_every_code_in_every_place_is_its_value() -> None:
    tables = {"$9": unpacking.FIRST_NEGATIVE, "$10": unpacking.FIRST_POSITIVE}
    operands = {name: np.full(len(WORDS), table.value, dtype=np.uint32) for name, table in tables.items()}
    found = run(unpacking.E2M1_PTX.value, {"$8": WORDS, **operands})
    values = np.stack([found[f"${i}"] for i in range(8)], 1)
    assert np.array_equal(values.view(np.int32), VALUES[CODES].view(np.int32))


def test_every_value_in_every_place_is_packed() -> None:
    values = VALUES[CODES].reshape(-1, 4, 2)  # the low and the high half of each byte
    values = np.where((values == 0) & (np.arange(len(values)) % 2 == 0)[:, None, None], np.float32(-0.0), values)
    operands = {f"${1 + i + 4 * j}": np.ascontiguousarray(values[:, i, j]) for i in range(4) for j in range(2)}
    assert np.array_equal(run(packing.E2M1_WORD_PTX.value, operands)["$0"], WORDS)


def test_floats_become_the_bytes_of_a_register() -> None:
    y = np.array([*np.arange(-127, 127.25, 0.25), *np.nextafter(np.arange(-126.5, 127), 0)], dtype=np.float32)
    four = [np.roll(y, 300 * i) for i in range(4)]
    found = run(quantize.INT8_PTX.value, {f"${1 + i}": each for i, each in enumerate(four)})["$0"]
    for i, each in enumerate(four):
        low = (each + np.float32(quantize.ROUND.value)).view(np.uint32) & 255  # how other backends round
        assert np.array_equal(found >> np.uint32(8 * i) & 255, low)


def test_the_power_that_rounds_to_a_step_of_e2m1() -> None:
    bits = np.arange(0, 2**32, 65521, dtype=np.uint32)
    operands = {"$1": bits, "$2": np.full(len(bits), quantize.STEP_OF_2.value, dtype=np.uint32)}
    total = (bits & np.uint32(quantize.EXPONENT.value)).view(np.int32) + np.int32(quantize.STEP_OF_2.value)
    expected = np.maximum(total, np.int32(quantize.ROUND_BITS.value))
    assert np.array_equal(run(quantize.POWER_PTX.value, operands)["$0"].view(np.int32), expected)


def test_two_elements_of_a_register_are_in_the_first_place() -> None:
    words = np.array([0, 1, 0x8000_0000, 0x1234_5678], dtype=np.uint32)
    found = run(bits.PAIR_PTX.value, {"$2": words})
    assert np.array_equal(found["$0"], words)
    assert not found["$1"].any()


def test_conversions_of_blackwell_give_half_of_every_value() -> None:
    found = run(unpacking.BLACKWELL_PTX.value, {"$8": WORDS})
    values = np.stack([found[f"${i}"] for i in range(8)], 1)
    assert np.array_equal(2 * values, VALUES[CODES])


def test_every_byte_in_every_place_is_its_number() -> None:
    byte = np.arange(256, dtype=np.uint8)
    words = np.stack([np.roll(byte, 64 * i) for i in range(4)], 1)
    found = run(bits.BYTES_PTX.value, {"$4": np.ascontiguousarray(words).view(np.uint32)[:, 0]})
    assert np.array_equal(np.stack([found[f"${i}"] for i in range(4)], 1), words.view(np.int8).astype(np.float32))


def test_a_newton_step_from_nearby_is_the_quotient() -> None:
    """A GPU's reciprocal is within one unit in the last place. Powers of two change no significand."""
    one, scale = np.longdouble(1), 1 + np.arange(128, dtype=np.float32) / 128  # all significands of a bfloat16
    quotient = np.float32(1) / scale
    for ulp in range(-4, 5):
        near = (quotient.view(np.int32) + np.int32(ulp)).view(np.float32)
        rest = (one - scale.astype(np.longdouble) * near).astype(np.float32)
        assert np.array_equal((rest.astype(np.longdouble) * near + near).astype(np.float32), quotient)
