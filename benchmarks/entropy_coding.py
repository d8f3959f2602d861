"""Would lossless coding of the messages pay? Bits and processor time, on real gradients and weights.

Codes of blocks, bfloat16 as it is, and the two bytes of a bfloat16 apart, whose exponents are far from evenly spread.
For each: the entropy of its symbols, what zlib's Huffman coder makes of it, seconds of one core to code and decode, and
what is left of the time on a link when bytes are coded before they travel and decoded after: nothing overlaps.

    python -m benchmarks.entropy_coding --json benchmarks/results/entropy_coding.json

The gradient is that of a small GPT after some steps of training on Python's source; the weights are that model's.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.kernels.format import uniform
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.methods.registry import PRESETS
from recipes.gpt import GPT
from recipes.text import Windows, standard_library


def trained(steps: int, width: int, depth: int) -> tuple[Tensor, Tensor]:
    """All matrices' gradients of one batch after `steps` steps, and their weights, flat."""
    torch.manual_seed(0)
    model = GPT(width, depth, heads=4, context=128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = iter(DataLoader(Windows(standard_library("train"), 128), batch_size=16, shuffle=True))
    for _ in range(steps + 1):
        tokens, targets = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    matrices = [param for name, param in model.named_parameters() if param.ndim == 2 and "blocks" in name]
    return torch.cat([param.grad.reshape(-1) for param in matrices if param.grad is not None]), torch.cat(
        [param.detach().reshape(-1) for param in matrices]
    )


def codes(x_N: Tensor, codec: BlockCodec) -> list[Tensor]:
    """The codes of whole blocks as they lie in a message; scales, a bfloat16 per block, are left alone."""
    fmt = codec.fmt
    x_N = x_N[: x_N.numel() // fmt.block_size * fmt.block_size]
    wire = codec.encode(x_N, seed=0)
    return [wire[: x_N.numel() * fmt.bits // 8]]


def halves(x_N: Tensor) -> list[Tensor]:
    """bfloat16: sign and exponent in one byte, as far as they go; the rest in the other."""
    bits_N = x_N.bfloat16().view(torch.int16).int() & 0xFFFF
    exponent = (bits_N >> 7) & 0xFF
    rest = ((bits_N >> 8) & 0x80) | (bits_N & 0x7F)
    return [exponent.to(torch.uint8), rest.to(torch.uint8)]


def entropy(symbols_N: Tensor) -> float:
    """Bits per symbol."""
    share = torch.bincount(symbols_N.int(), minlength=256).double() / symbols_N.numel()
    return float(-(share[share > 0] * share[share > 0].log2()).sum())


def timed(call: Callable[[], bytes], repeats: int) -> tuple[bytes, float]:
    """The result and the seconds of this process that the fastest of some calls took."""
    best = float("inf")
    for _ in range(repeats):
        began = time.process_time()
        result = call()
        best = min(best, time.process_time() - began)
    return result, best


def measured(planes: list[Tensor], numel: int, nbytes_per_s: float, repeats: int) -> dict[str, float]:
    """A plane that Huffman's code makes no shorter travels as it is."""
    plain = coded = 0
    bound = coding = 0.0
    for symbols in planes:
        raw = symbols.numpy().tobytes()

        def code(raw: bytes = raw) -> bytes:
            coder = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
            return coder.compress(raw) + coder.flush()

        short, coding_s = timed(code, repeats)
        decoded, decoding_s = timed(lambda short=short: zlib.decompress(short, -15), repeats)  # type: ignore[misc]
        assert decoded == raw
        plain += len(raw)
        bound += entropy(symbols) * symbols.numel() / 8
        if len(short) < 0.99 * len(raw):
            coded += len(short)
            coding += coding_s + decoding_s
        else:
            coded += len(raw)
    return {
        "bits": round(8 * plain / numel, 3),
        "entropy_bits": round(8 * bound / numel, 3),
        "coded_bits": round(8 * coded / numel, 3),
        "coding_ns_per_element": round(1e9 * coding / numel, 2),
        "share_of_time": round((coded / nbytes_per_s + coding) / (plain / nbytes_per_s), 3),
        "share_of_time_without_coding": round(coded / plain, 3),
    }


def main(
    steps: Annotated[int, typer.Option(help="of training before the gradient is taken")] = 60,
    width: Annotated[int, typer.Option(help="of the model")] = 128,
    depth: Annotated[int, typer.Option(help="of the model")] = 4,
    mbit: Annotated[float, typer.Option(help="of the link, Mbit/s")] = 200.0,
    repeats: Annotated[int, typer.Option(help="of each timing; the best counts")] = 3,
    json_path: Annotated[Path, typer.Option("--json", help="results file")] = Path(
        "benchmarks/results/entropy_coding.json"
    ),
) -> None:
    """Measure codes of gradients and weights."""
    torch.set_num_threads(1)
    gradient, weight = trained(steps, width, depth)
    rows: dict[str, dict[str, float]] = {}
    for what, x_N in {"gradient": gradient, "weights": weight}.items():
        ways = {f"{bits} bits": codes(x_N, BlockCodec(uniform(bits, 128))) for bits in (2, 4, 8)}
        ways |= {name: codes(x_N, _uplink(name)) for name in ("loco1", "loco2")} if what == "gradient" else {}
        ways["bfloat16"] = [x_N.bfloat16().view(torch.uint8)]
        ways["bfloat16, exponents apart"] = halves(x_N)
        for how, planes in ways.items():
            rows[f"{what}, {how}"] = measured(planes, x_N.numel(), mbit * 1e6 / 8, repeats)
            typer.echo(f"{what}, {how}: {rows[f'{what}, {how}']}")
    json_path.write_text(json.dumps({"mbit": mbit, "elements": gradient.numel(), "rows": rows}, indent=1) + "\n")


def _uplink(name: str) -> BlockCodec:
    pair = PRESETS[name].method(TensorSpec("w", (1024, 1024)))
    assert isinstance(pair, CodecPair)
    return BlockCodec(pair.uplink.fmt)  # type: ignore[attr-defined]


if __name__ == "__main__":
    typer.run(main)
