"""Small language models of all ranks at once, for studies of local steps: weights are [W, ...], tokens [W, B, T]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256
Params = dict[str, Tensor]


class Transformer:
    """Pre-norm, two blocks, bytes."""

    name = "transformer"
    width, depth, heads = 40, 2, 4

    def shapes(self, context: int) -> dict[str, tuple[int, ...]]:
        C = self.width
        found: dict[str, tuple[int, ...]] = {"embedding": (VOCABULARY, C), "position": (context, C)}
        for at in range(self.depth):
            found |= {
                f"blocks.{at}.norm1": (C,),
                f"blocks.{at}.qkv": (3 * C, C),
                f"blocks.{at}.out": (C, C),
                f"blocks.{at}.norm2": (C,),
                f"blocks.{at}.mlp_in": (4 * C, C),
                f"blocks.{at}.mlp_out": (C, 4 * C),
            }
        return found | {"norm": (C,), "head": (VOCABULARY, C)}

    def logits(self, p: Params, tokens_WBT: Tensor) -> Tensor:
        W, B, T = tokens_WBT.shape
        x = _look_up(p["embedding"], tokens_WBT) + p["position"][:, None, :T]
        for at in range(self.depth):
            q = {name.rpartition(".")[2]: value for name, value in p.items() if name.startswith(f"blocks.{at}.")}
            qkv = _linear(_norm(x, q["norm1"]), q["qkv"]).view(W * B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(*qkv, is_causal=True)
            x = x + _linear(attended.transpose(1, 2).reshape(W, B, T, -1), q["out"])
            x = x + _linear(F.gelu(_linear(_norm(x, q["norm2"]), q["mlp_in"])), q["mlp_out"])
        return _linear(_norm(x, p["norm"]), p["head"])


class Recurrent:
    """One layer of gated recurrent units, bytes."""

    name = "recurrent"
    width, hidden = 40, 80

    def shapes(self, context: int) -> dict[str, tuple[int, ...]]:
        C, H = self.width, self.hidden
        return {
            "embedding": (VOCABULARY, C),
            "inputs": (3 * H, C),
            "state": (3 * H, H),
            "bias": (3 * H,),
            "head": (VOCABULARY, H),
        }

    def logits(self, p: Params, tokens_WBT: Tensor) -> Tensor:
        W, B, _ = tokens_WBT.shape
        inputs = _linear(_look_up(p["embedding"], tokens_WBT), p["inputs"]) + p["bias"][:, None, None]
        state, states, recurrent = inputs.new_zeros(W, B, self.hidden), [], p["state"].transpose(1, 2)
        for x in inputs.unbind(2):
            from_state = torch.bmm(state, recurrent)
            gates = torch.sigmoid(x[..., : 2 * self.hidden] + from_state[..., : 2 * self.hidden])
            reset, update = gates.chunk(2, -1)
            new = torch.tanh(x[..., 2 * self.hidden :] + reset * from_state[..., 2 * self.hidden :])
            state = torch.lerp(new, state, update)
            states.append(state)
        return _linear(torch.stack(states, 2), p["head"])


MODELS = {"transformer": Transformer(), "recurrent": Recurrent()}


def _linear(x_WBTC: Tensor, weight_WOC: Tensor) -> Tensor:
    return torch.bmm(x_WBTC.flatten(1, 2), weight_WOC.transpose(1, 2)).view(*x_WBTC.shape[:3], -1)


def _norm(x_WBTC: Tensor, weight_WC: Tensor) -> Tensor:
    return F.layer_norm(x_WBTC, x_WBTC.shape[-1:]) * weight_WC[:, None, None]


def _look_up(table_WVC: Tensor, tokens_WBT: Tensor) -> Tensor:
    W, V = table_WVC.shape[:2]
    rows = tokens_WBT + (torch.arange(W) * V)[:, None, None]
    return F.embedding(rows, table_WVC.reshape(W * V, -1))


def initial(model: Any, workers: int, context: int, seed: int) -> Params:
    """The same weights for every rank."""
    generator = torch.Generator().manual_seed(seed)
    params = {}
    for name, shape in model.shapes(context).items():
        if len(shape) == 1:
            value = torch.zeros(shape) if name == "bias" else torch.ones(shape)
        else:
            std = 0.02 if name in ("embedding", "position", "head") else shape[1] ** -0.5
            value = torch.randn(shape, generator=generator) * std
        params[name] = nn.Parameter(value.expand(workers, *shape).clone())
    return params
