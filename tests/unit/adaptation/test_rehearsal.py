"""Every configuration can be rehearsed for any number of ranks, and both hops are."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from lowbit_strategy import PRESETS, LoCo
from lowbit_strategy.adaptation.rehearsal import _SPECS, rehearse
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods.loco import LoCoCodec

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset(name: str) -> None:
    level = PRESETS[name].phase(0)
    has_codecs = any(isinstance(level.assign(spec).method, CodecPair) for spec in _SPECS)
    for sharded in (False, True):
        with mock.patch.object(GradientSync, "reduce", autospec=True, side_effect=GradientSync.reduce) as reduce:
            rehearse(level, world_size=3, sharded=sharded, device=CPU)
        dtypes = [call.args[2].dtype for call in reduce.call_args_list]
        assert dtypes == ([torch.float32, torch.bfloat16] if has_codecs else [])


@pytest.mark.parametrize(("sharded", "decodes"), [(False, 2), (True, 1)])
def test_both_hops_with_as_many_sources_as_there_are_ranks(sharded: bool, decodes: int) -> None:
    sources: list[int] = []
    original = LoCoCodec.decode_sum_

    def counted(self: LoCoCodec, wire_WB: torch.Tensor, *rest: object) -> None:
        sources.append(wire_WB.shape[0])
        original(self, wire_WB, *rest)  # type: ignore[arg-type]

    with mock.patch.object(LoCoCodec, "decode_sum_", counted):
        rehearse(LoCo(bits=4), world_size=11, sharded=sharded, device=CPU)
    formats, dtypes = 2, 2  # 4 bits and, for embeddings, 8
    assert sources.count(11) == formats * dtypes
    assert len(sources) == decodes * formats * dtypes
