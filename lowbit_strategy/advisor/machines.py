"""Machines whose figures their makers publish: `machines.json`, and what `nvidia-smi` says of this one."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowbit_strategy.options.conversion import did_you_mean

HERE = "here"  # the name that asks nvidia-smi
_USED = 0.4  # of a GPU's peak, which training computes at


@dataclass(frozen=True, slots=True)
class Machine:
    """Nominal figures of one machine.

    Args:
        name: As users give it.
        gpus: How many it has.
        inside_nbytes_per_s: Of each GPU to the others of the machine, one way.
        memory_nbytes: Of each GPU.
        flops: Operations per second that training computes at, of each GPU.
        link_nbytes_per_s: Of the machine to others; None: not known.
        latency_s: To others, one way; None: not known.
        source: Who says so.
    """

    name: str
    gpus: int
    inside_nbytes_per_s: float
    memory_nbytes: float
    flops: float
    link_nbytes_per_s: float | None
    latency_s: float | None
    source: str


def find_machine(name: str) -> Machine:
    """A machine of the table, or ``here``.

    Raises:
        ValueError: There is none of that name, or `nvidia-smi` does not tell.
    """
    name = name.lower()
    if name == HERE:
        return machine_of(
            _nvidia_smi("--query-gpu=name,memory.total", "--format=csv,noheader"), _nvidia_smi("topo", "-m")
        )
    table = _table()
    machines = table["machines"]
    if name not in machines:
        hint = did_you_mean(name, machines)
        raise ValueError(f"--machine {name!r} is not known{hint} Known: {HERE}, {', '.join(machines)}")
    known = machines[name]
    gpu = table["gpus"][known["gpu"]]
    return Machine(
        name,
        known["gpus"],
        1e9 * gpu[f"{known['inside']}_gbytes"],
        1e9 * known["memory_gbytes"],
        _USED * 1e12 * gpu["tflops"],
        1e9 / 8 * known["link_gbit"],
        1e-6 * known["latency_us"],
        known["source"],
    )


def machine_of(gpus: str, topology: str) -> Machine:
    """This machine, from what ``nvidia-smi`` prints.

    Args:
        gpus: Of ``--query-gpu=name,memory.total --format=csv,noheader``.
        topology: Of ``topo -m``.

    Raises:
        ValueError: A GPU that the table does not have.
    """
    table = _table()["gpus"]
    lines = [line.split(",") for line in gpus.strip().splitlines()]
    name = lines[0][0].strip()
    known = next((each for each in sorted(table, key=len, reverse=True) if _is_named(each, name)), None)
    if known is None:
        raise ValueError(
            f"--machine here: {name!r} is not in the table of GPUs. Known: {', '.join(table)}; give --intra"
        )
    rows = [line for line in topology.splitlines() if re.match(r"\s*GPU\d+\s", line)]
    linked = any(re.search(r"\bNV\d+\b", line) for line in rows) and "nvlink_gbytes" in table[known]
    inside = table[known]["nvlink_gbytes" if linked else "pcie_gbytes"]
    memory = float(lines[0][1].split()[0]) * 2**20
    flops = _USED * 1e12 * table[known]["tflops"]
    return Machine(HERE, len(lines), 1e9 * inside, memory, flops, None, None, f"nvidia-smi: {len(lines)} x {name}")


def _table() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(Path(__file__).with_name("machines.json").read_text("utf-8"))
    return found


def _is_named(known: str, name: str) -> bool:
    words = name.replace("-", " ").upper().split()
    return all(word in words for word in known.upper().split())


def _nvidia_smi(*arguments: str) -> str:
    try:
        return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"--machine here: nvidia-smi does not answer ({error}): give --intra and --memory") from None
