"""The strategies' constructors: one list of options, presets' names, remedies for options of others."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from typing import Any

import pytest
import torch

from lowbit_strategy import LoCo, TopK, fabric, lightning, lightning_fabric, preset, pytorch_lightning
from lowbit_strategy.accelerate import LowBitPlugin
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.hooks.bucket_cap import default_bucket_cap_mb

NAMESPACES = (lightning, pytorch_lightning, fabric, lightning_fabric)
DDP = [namespace.LowBitDDPStrategy for namespace in NAMESPACES]
FSDP = [namespace.LowBitFSDPStrategy for namespace in NAMESPACES]


@pytest.mark.parametrize("cls", [*DDP, *FSDP, LowBitPlugin])
def test_every_option_of_synchronization_is_an_argument_with_the_same_default(cls: Any) -> None:
    arguments = inspect.signature(cls).parameters
    for field in dataclasses.fields(SyncOptions):
        assert arguments[field.name].default == field.default
        assert arguments[field.name].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize("cls", [*DDP, *FSDP])
def test_every_method_of_the_framework_is_overridden_above_it(cls: Any) -> None:
    """What reads like a base of a framework is one, of the same package, when the program runs."""
    frameworks = {base.__module__.partition(".strategies")[0] for base in cls.__mro__ if base.__name__ == "Strategy"}
    assert len(frameworks) == 1
    (framework,) = frameworks
    ours = [base for base in cls.__mro__ if base.__name__ in ("SessionStrategy", "SessionsStrategy")]
    assert [base.__module__.startswith(framework) for base in ours[0].__bases__] == [False, True]
    assert type(pickle.loads(pickle.dumps(cls("loco2")))) is cls  # for processes that are spawned


@pytest.mark.parametrize("cls", [*DDP, *FSDP])
def test_a_preset_s_name_is_a_compressor(cls: Any) -> None:
    assert cls("loco2").compressor == preset("loco2")
    assert cls().compressor == LoCo()
    assert cls(TopK()).compressor == TopK()
    with pytest.raises(ValueError, match="unknown compressor 'locoo'; did you mean 'loco'"):
        cls("locoo")
    with pytest.raises(ValueError, match=r"compressor must be .*'loco2'.*, got 4"):
        cls(4)


def test_a_preset_s_name_is_a_compressor_for_the_plugin() -> None:
    assert LowBitPlugin("loco2").compressor == preset("loco2")  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", FSDP)
def test_options_of_fsdp1_are_answered_with_the_remedy(cls: Any) -> None:
    with pytest.raises(TypeError, match=r"cpu_offload is an option of FSDP1, and this strategy is FSDP2: .*min_shard_"):
        cls(cpu_offload=True)
    with pytest.raises(TypeError, match=r"has no option 'min_shard_nume'; did you mean 'min_shard_numel'"):
        cls(min_shard_nume=3)
    with pytest.raises(ValueError, match="min_shard_numel must be a positive integer, got '1M'"):
        cls(min_shard_numel="1M")


@pytest.mark.parametrize("cls", DDP)
def test_buckets_are_larger_on_cuda(cls: Any) -> None:
    chosen = cls()
    chosen.choose_buckets(torch.device("cuda"))
    assert 100 <= chosen._ddp_kwargs["bucket_cap_mb"] <= 200
    chosen = cls(bucket_cap_mb=30)
    chosen.choose_buckets(torch.device("cuda"))
    assert chosen._ddp_kwargs["bucket_cap_mb"] == 30
    assert default_bucket_cap_mb(torch.device("cpu")) == 8


def test_which_compressors_are_sparse() -> None:
    assert TopK().is_sparse
    assert preset("exdyna").is_sparse
    assert not LoCo().is_sparse
    assert not preset("powersgd").is_sparse
