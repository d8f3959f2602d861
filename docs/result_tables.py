"""Tables of what was measured, made from `benchmarks/results`."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"

# -- predicted steps --------------------------------------------------------------------------------------------------

_COLUMNS = (("ddp", "fsdp2", "dense_hsdp"), ("fsdp2-bf16",), ("loco_ddp", "loco_fsdp", "loco_hsdp"))
_COLUMNS += (("loco1_ddp", "loco1_fsdp", "loco1_hsdp"), ("diloco_ddp", "diloco_hsdp"))
_LAYOUTS = {"ddp": "DDP", "fsdp": "FSDP2", "hsdp": "HSDP"}
_RATES = {"none": "loopback", "1gbit": "1 Gbit/s", "200mbit": "200 Mbit/s", "50mbit": "50 Mbit/s"}


def _by_link(name: list[str]) -> tuple[int, int, str, str]:
    layout, hosts, rate, delay = name
    return int(delay.removesuffix("ms")), list(_RATES).index(rate), layout, hosts


def predicted_steps() -> str:
    """Every cell of `benchmarks/predicted_steps.py`: predicted over measured seconds."""
    runs = json.loads((RESULTS / "predicted_steps.json").read_text())["runs"]
    head = "| link | layout, hosts x ranks | float32 | bf16 | 4 bits | 1 bit | DiLoCo |"
    rows, ratios = [], []
    for layout, hosts, rate, delay in sorted(map(str.split, runs), key=_by_link):
        run = runs[f"{layout} {hosts} {rate} {delay}"]
        cells = []
        for variants in _COLUMNS:
            found = [run["cells"][variant] for variant in variants if variant in run["cells"]]
            ratios += [cell["seconds"] / cell["measured_s"] for cell in found]
            cells.append("".join(f"{cell['seconds']:.3g} / {cell['measured_s']:.3g}" for cell in found))
        late = "" if delay == "0ms" else f", {delay.removesuffix('ms')} ms"
        rows.append(f"| {_RATES[rate]}{late} | {_LAYOUTS[layout]}, {hosts} | {' | '.join(cells)} |")
    near = [sum(abs(ratio - 1) <= bound for ratio in ratios) for bound in (0.15, 0.3)]
    every = [cell for run in runs.values() for cell in run["cells"].values()]
    inside = sum(cell["low"] <= cell["measured_s"] <= cell["high"] for cell in every)
    counted = f"Of {len(ratios)} cells {near[0]} are within 15 %, {near[1]} within 30 %, {inside} inside their range."
    return "\n".join((head, "|---|---|---|---|---|---|---|", *rows, "", counted))


# -- compiled kernels -------------------------------------------------------------------------------------------------

_MEASURED = {  # names in `gpu_acceptance_h200.json`
    "loco, 4 bits, bf16": "loco 4bit bfloat16",
    "loco, E2M1, bf16": "loco e2m1 bfloat16",
    "loco, E2M1, float32": "loco e2m1 float32",
    "loco, 8 bits, bf16": "loco 8bit bfloat16",
    "sum of 8, 4 bits": "decode_sum 4bit W=8",
    "sum of 8, E2M1": "decode_sum e2m1 W=8",
    "sum of 8, 8 bits": "decode_sum 8bit W=8",
    "sum of 64, 4 bits": "decode_sum 4bit W=64",
    "sum of 64, E2M1": "decode_sum e2m1 W=64",
    "sum of 64, 8 bits": "decode_sum 8bit W=64",
}


def compiled_kernels() -> str:
    """What the code of each kernel says on three architectures, and what was measured before on one."""
    compiled = json.loads((RESULTS / "compiled_kernels.json").read_text())
    earlier = json.loads((RESULTS / "gpu_acceptance_h200.json").read_text())
    measured = {row["name"]: f"{row['share_of_copy']:.2f}" for row in earlier["kernels"]}
    rows = []
    for name, archs in compiled["kernels"].items():
        cells = [
            ", ".join(f"{figures[what]:g}" for figures in archs.values())
            for what in ("instructions", "registers", "warps", "wide_share", "share")
        ]
        rows.append(f"| {name} | {' | '.join(cells)} | {measured.get(_MEASURED.get(name, ''), '')} |")
    head = "| kernel | instructions per element | registers | warps | wide accesses | share of a copy | measured |"
    note = (
        f"On sm_80, sm_90, sm_100; Triton {compiled['triton']}. The share is computed for an A100, an H200 and a B200."
        f" Measured on an H200, {earlier['date']}, with earlier kernels."
    )
    return "\n".join((head, "|---|---|---|---|---|---|---|", *rows, "", note))


def module_operations() -> str:
    """Torch's operations of an FSDP2 module in a step, fewest first."""
    found = json.loads((RESULTS / "gpu_operations.json").read_text())
    operations = dict(found["operations"])
    stock, model = operations["stock"], operations.pop("alone")
    rows = [
        f"| {name} | {each:g} | {each / stock:.2f} | {(each - model) / (stock - model):.1f} |"
        for name, each in sorted(operations.items(), key=lambda item: item[1])
    ]
    head = "| | operations | times stock's | without the model's own |"
    return "\n".join((head, "|---|---|---|---|", *rows, "", f"torch {found['torch']}."))
