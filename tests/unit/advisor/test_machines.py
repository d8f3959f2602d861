"""Machines of the table, and this one by what nvidia-smi prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lowbit_strategy.advisor import machines
from lowbit_strategy.advisor.machines import find_machine, machine_of

TABLE = json.loads(Path(machines.__file__).with_name("machines.json").read_text())
NVLINK = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-15\nGPU1\tNV18\t X \t0-15\n\nLegend:\n  NV#  = NVLinks\n"
PCIE = NVLINK.replace("NV18", "PHB")


def test_every_machine_has_its_figures_and_its_source() -> None:
    for name in TABLE["machines"]:
        machine = find_machine(name)
        assert machine == find_machine(name.upper())
        assert machine.source
        assert machine.gpus >= 1
        assert 1e9 < machine.inside_nbytes_per_s < 1e12
        assert 10e9 < machine.memory_nbytes < 300e9
        assert 1e6 < (machine.link_nbytes_per_s or 0) < 1e12
        assert 1e-6 < (machine.latency_s or 0) < 1


def test_a_name_that_is_not_known() -> None:
    with pytest.raises(ValueError, match=r"'p4e' is not known.*p4d.*home-1gbit"):
        find_machine("p4e")


@pytest.mark.parametrize(
    ("name", "topology", "gbytes"),
    [
        ("NVIDIA H100 80GB HBM3", NVLINK, 450),
        ("NVIDIA H100 PCIe", PCIE, 64),
        ("NVIDIA A100-SXM4-40GB", NVLINK, 300),
        ("Tesla V100-SXM2-16GB", NVLINK, 150),
        ("NVIDIA GeForce RTX 4090", PCIE, 32),
        ("NVIDIA L40S", PCIE, 32),
    ],
)
def test_this_machine_by_what_nvidia_smi_prints(name: str, topology: str, gbytes: float) -> None:
    found = machine_of(f"{name}, 81559 MiB\n{name}, 81559 MiB\n", topology)
    assert found.gpus == 2
    assert found.inside_nbytes_per_s == gbytes * 1e9
    assert found.memory_nbytes == 81559 * 2**20
    assert found.link_nbytes_per_s is None


def test_a_gpu_that_is_not_known() -> None:
    with pytest.raises(ValueError, match="'Radeon VII' is not in the table"):
        machine_of("Radeon VII, 16384 MiB\n", PCIE)
