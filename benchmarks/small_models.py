"""Language models on bytes that train in milliseconds a step: a transformer, a recurrent and a convolutional one, and a
fourth of another kind on which settings are chosen.

Shapes: B sequences, T positions, C channels, V = 256 byte values.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.gpt import GPT, VOCABULARY
from recipes.text import Split, split_of, standard_library


class Recurrent(nn.Module):
    """One layer of gated recurrent units (Cho et al., 2014, arXiv 1406.1078), between embedding and output head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.from_input = nn.Linear(width, 3 * width)
        self.from_state = nn.Linear(width, 3 * width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        inputs = self.from_input(self.embedding(tokens_BT)).unbind(1)
        h_BC = torch.zeros_like(inputs[0][:, : self.norm.normalized_shape[0]])
        states = []
        for x in inputs:
            x_gates, x_new = x.split([2 * h_BC.shape[1], h_BC.shape[1]], 1)
            s_gates, s_new = self.from_state(h_BC).split([2 * h_BC.shape[1], h_BC.shape[1]], 1)
            reset, keep = torch.sigmoid(x_gates + s_gates).chunk(2, 1)
            h_BC = torch.lerp(torch.tanh(x_new + reset * s_new), h_BC, keep)
            states.append(h_BC)
        logits_BTV: Tensor = self.head(self.norm(torch.stack(states, 1)))
        return logits_BTV


class Convolutional(nn.Module):
    """Causal gated convolutions of three positions, each layer twice as far apart (Dauphin et al., 2016,
    arXiv 1612.08083). A convolution is a matrix on three shifted copies of its input.
    """

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.layers = nn.ModuleList(nn.Linear(3 * width, 2 * width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.embedding(tokens_BT)
        for i, (norm, layer) in enumerate(zip(self.norms, self.layers, strict=True)):
            y_BTC, apart, length = norm(x_BTC), 2**i, x_BTC.shape[1]
            shifted = [F.pad(y_BTC, (0, 0, k * apart, 0))[:, :length] for k in range(3)]
            x_BTC = x_BTC + F.glu(layer(torch.cat(shifted, 2)), 2)
        logits_BTV: Tensor = self.head(self.norm(x_BTC))
        return logits_BTV


class Mixer(nn.Module):
    """For choosing settings: positions mixed by one causal matrix per layer, channels by a gated two-layer network."""

    def __init__(self, width: int, depth: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.ParameterList(torch.eye(context).repeat(4, 1, 1) * 0.5 for _ in range(depth))
        self.mixed = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.gated = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(depth))
        self.out = nn.ModuleList(nn.Linear(2 * width, width, bias=False) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.embedding(tokens_BT)
        B, T, C = x_BTC.shape
        for positions, mixed, gated, out in zip(self.positions, self.mixed, self.gated, self.out, strict=True):
            heads = F.rms_norm(x_BTC, (C,)).view(B, T, 4, C // 4)
            x_BTC = x_BTC + mixed(torch.einsum("hts,bshc->bthc", positions.tril(), heads).reshape(B, T, C))
            up, gate = gated(F.rms_norm(x_BTC, (C,))).chunk(2, 2)
            x_BTC = x_BTC + out(up * F.silu(gate))
        logits_BTV: Tensor = self.head(F.rms_norm(x_BTC, (C,)))
        return logits_BTV


def make_model(kind: str, context: int) -> nn.Module:
    """``transformer``, ``recurrent``, ``convolutional`` or ``mixer``, of 70 to 120 thousand parameters."""
    match kind:
        case "transformer":
            return GPT(48, 2, 2, context)
        case "recurrent":
            return Recurrent(80)
        case "convolutional":
            return Convolutional(48, 3)
        case "mixer":
            return Mixer(56, 2, context)
    raise ValueError(f"unknown model {kind!r}: transformer, recurrent, convolutional or mixer")


@functools.cache
def headers(split: Split) -> Tensor:
    """The C++ headers that PyTorch is installed with, as uint8 [N]: another text than the standard library's."""
    root = Path(torch.__file__).parent / "include"
    names = sorted(path.relative_to(root) for path in root.rglob("*.h"))
    ours = [name for name in names if split_of(name) == split]
    return torch.frombuffer(bytearray().join((root / name).read_bytes() for name in ours), dtype=torch.uint8)


def text_of(kind: str, split: Split) -> Tensor:
    return headers(split) if kind == "mixer" else standard_library(split)
