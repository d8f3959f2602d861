"""What can be served, and the errors about the rest."""

from __future__ import annotations

import pytest

from lowbit_strategy.accelerate.supported import check_served


@pytest.mark.parametrize("kind", ["NO", "MULTI_CPU", "MULTI_GPU"])
def test_ddp_and_single_processes(kind: str) -> None:
    check_served(kind)


def test_fsdp2_only() -> None:
    check_served("FSDP", fsdp_version=2)
    with pytest.raises(ValueError, match="FSDP1 cannot be compressed: set fsdp_version: 2"):
        check_served("FSDP", fsdp_version=1)


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM", "XLA", "MULTI_XPU", "MULTI_NPU"])
def test_kinds_that_cannot_be_served(kind: str) -> None:
    with pytest.raises(ValueError, match=f"distributed_type {kind} cannot be compressed: use MULTI_GPU"):
        check_served(kind)


def test_deepspeed_s_sequence_parallelism() -> None:
    with pytest.raises(ValueError, match="sp_size = 2 cannot be compressed"):
        check_served("FSDP", fsdp_version=2, sp_size=2)
