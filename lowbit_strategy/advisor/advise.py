"""``lowbit advise`` and ``lowbit estimate``: what a set-up would cost, from numbers alone."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from lowbit_strategy.advisor.cluster import ANY_RATE, read_bench
from lowbit_strategy.advisor.quantities import count

STEPS_MEAN = (
    "steps: per cent more to the same loss, measured at the best learning rate and\n"
    "below; the advice counts them. *: with second_moment=True, for Adam and AdamW."
)
_TOO_MANY = 1e13  # parameters

Params = Annotated[str | None, typer.Option(help="Parameters of a transformer, such as 7e9 or 7B.")]
Model = Annotated[str | None, typer.Option(help="package:Class, called without arguments on the meta device.")]
HFConfig = Annotated[Path | None, typer.Option(help="A folder with the config.json of a Hugging Face model.")]
Nodes = Annotated[int | None, typer.Option(min=1, max=100_000, help="Machines. Default: 2, or as measured.")]
RanksPerNode = Annotated[
    int | None, typer.Option(min=1, max=128, help="Processes on each. Default: 8, or as measured.")
]
TensorParallel = Annotated[
    int, typer.Option(min=1, max=128, help="Ranks of a node that have a part of every matrix each.")
]
PrecisionName = Annotated[
    str | None,
    typer.Option(
        help="What you train in: 32, bf16-mixed or bf16-true. With 32 the comparison is with float32. Default:"
        " bf16-mixed; bf16-true for a model of bf16 weights."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def advise(
    params: Params = None,
    model: Model = None,
    hf_config: HFConfig = None,
    nodes: Nodes = None,
    ranks_per_node: RanksPerNode = None,
    tensor_parallel: TensorParallel = 1,
    machine: Annotated[str | None, typer.Option(help="A machine of the table, such as p4d or home-1gbit.")] = None,
    link: Annotated[str | None, typer.Option(help="Bandwidth of a node to the others. Default: 10gbit.")] = None,
    latency: Annotated[str | None, typer.Option(help="Between nodes, one way. Default: 0.1ms.")] = None,
    intra: Annotated[
        str | None, typer.Option(help="Bandwidth of a GPU inside its node, one way. Default: 50GB/s.")
    ] = None,
    compute: Annotated[
        str | None, typer.Option(help="A step without communication. Default: 4,096 tokens on such a GPU.")
    ] = None,
    rdma: Annotated[
        bool | None,
        typer.Option(
            "--rdma/--tcp", help="Links between nodes carry RDMA (InfiniBand, RoCE, EFA). Default: TCP, or as known."
        ),
    ] = None,
    precision: PrecisionName = None,
    bench: Annotated[Path | None, typer.Option(help="Links and coding speed as lowbit bench has written them.")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Ranks compute on CPUs, with gloo.")] = False,
    memory: Annotated[
        str | None, typer.Option(help="Of a device. Default: 80GB. What does not fit is marked, and not recommended.")
    ] = None,
    close: Annotated[bool, typer.Option("--close", help="Recommend what is a little worse in loss, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Predict the step time of every sensible set-up, and say whether to use one, not to, or to measure first."""
    given = {"link": link, "latency": latency, "inside": intra, "compute": compute, "memory": memory}
    number = _number(params, model, hf_config)
    from lowbit_strategy.advisor.advice import decide, setup_options  # with torch, once there is a model
    from lowbit_strategy.advisor.inputs import gather, is_far
    from lowbit_strategy.advisor.machines import find_machine

    measured = None if bench is None else read_bench(bench)
    known = None if machine is None else find_machine(machine)
    assumed = []
    if measured is not None and measured.nodes * measured.ranks_per_node > 1:
        nodes, ranks_per_node = nodes or measured.nodes, ranks_per_node or measured.ranks_per_node
    if nodes is None:
        nodes = 2
        assumed.append("2 nodes")
    if ranks_per_node is None:
        ranks_per_node = 8 if known is None else known["gpus"]
        assumed += ["8 ranks on each"] if known is None else []
    workload = _workload(number, model, hf_config, nodes, ranks_per_node, tensor_parallel, precision)
    on_cpu = cpu or (measured is not None and measured.cluster.gloo)
    situation = gather(given, workload.numel, measured, known, on_cpu=on_cpu, rdma=rdma)
    situation = situation.at({"link": 1 / tensor_parallel})  # each part's messages get an equal share
    if on_cpu:
        far = is_far(situation.cluster.inter_node.latency_s)
        workload = replace(workload, device_type="cpu", far=far)
    found = setup_options(workload, situation)
    verdict = decide(found, workload, situation, close=close)
    sources = situation.sources(assumed, nodes, ranks_per_node)
    sources += "" if bench is None else f", in {bench}"
    if as_json:
        print(json.dumps(_everything(found, workload, situation, verdict, sources), indent=1))
    else:
        print(sources)
        Console().print(_table(found, workload, situation.memory_nbytes))
        print(STEPS_MEAN, verdict.sentence, sep="\n")


def estimate(
    params: Params = None,
    model: Model = None,
    hf_config: HFConfig = None,
    nodes: Nodes = None,
    ranks_per_node: RanksPerNode = None,
    tensor_parallel: TensorParallel = 1,
    precision: PrecisionName = None,
    as_json: AsJson = False,
) -> None:
    """Memory and bytes of every sensible set-up; no link needed."""
    number = _number(params, model, hf_config)
    ranks = ranks_per_node or 8
    workload = _workload(number, model, hf_config, nodes or 2, ranks, tensor_parallel, precision)
    from lowbit_strategy.advisor.advice import kept, setup_options

    found = setup_options(workload)
    if as_json:
        ways = [asdict(each.memory) | {"differs": each.differs, "costs": each.costs} for each in kept(workload)]
        print(json.dumps({"choices": [_as_dict(each, workload) for each in found], "loco_fsdp_keeps": ways}, indent=1))
        return
    Console().print(_table(found, workload, None))
    print(STEPS_MEAN)
    print("What loco_fsdp keeps on a rank, chosen when the model is set up by the room that there is (memory=):")
    for each in kept(workload):
        print(f"  {each.differs or 'by default'}: {each.arithmetic()}{'; cost: ' + each.costs if each.costs else ''}")


def _number(params: str | None, model: str | None, hf_config: Path | None) -> float | None:
    """Number of parameters, if that is what was given.

    Raises:
        ValueError: Not one of the three is given, or it is no number of parameters.
    """
    if sum(each is not None for each in (params, model, hf_config)) != 1:
        raise ValueError("give one of --params, --model and --hf-config")
    if params is None:
        return None
    number = count(params)
    if number > _TOO_MANY:
        raise ValueError(f"--params {params}: no model has that many parameters: give at most {_TOO_MANY:g}")
    return number


def _workload(
    number: float | None,
    model: str | None,
    hf_config: Path | None,
    nodes: int,
    ranks_per_node: int,
    tensor_parallel: int,
    precision: str | None,
) -> Any:
    """Raise a ValueError if the model cannot be built, the precision is unknown, or parts do not fit on a node."""
    from lowbit_strategy.advisor.transformer import transformer
    from lowbit_strategy.advisor.workload import PRECISIONS, Workload

    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"--precision {precision!r} is not known: give one of {', '.join(PRECISIONS)}")
    if number is not None:
        specs, held = transformer(number), PRECISIONS[precision or "bf16-mixed"]
        return Workload.in_parts(tensor_parallel, specs, nodes, ranks_per_node, *held)
    from lowbit_strategy.model.parameters import describe_parameters

    module = _on_meta(_maker(model) if model is not None else _from_hf(hf_config))
    specs = describe_parameters(module)
    if not specs:
        raise ValueError("the model has no parameter that requires a gradient")
    if precision is None:
        largest = max(param.element_size() for param in module.parameters())
        precision = "bf16-true" if largest == 2 else "bf16-mixed"
    return Workload.in_parts(tensor_parallel, specs, nodes, ranks_per_node, *PRECISIONS[precision])


def _maker(name: str) -> Callable[[], Any]:
    package, _, attribute = name.partition(":")
    sys.path.insert(0, ".")
    try:
        found: Any = getattr(importlib.import_module(package), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--model {name}: {error}; give it as package.module:Class") from error
    return found


def _from_hf(folder: Path | None) -> Callable[[], Any]:
    assert folder is not None
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ValueError("--hf-config needs transformers: pip install 'lowbit-strategy[transformers]'") from error
    return lambda: AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))


def _on_meta(make: Callable[[], Any]) -> Any:
    import torch

    try:
        with torch.device("meta"):
            made = make()
    except Exception as error:
        raise ValueError(f"the model cannot be built on the meta device: {type(error).__name__}: {error}") from error
    if not isinstance(made, torch.nn.Module):
        raise ValueError(f"the model must be a torch.nn.Module, got {type(made).__name__}")
    return made


def _as_dict(choice: Any, workload: Any) -> dict[str, Any]:
    return {
        "name": choice.name,
        "line": choice.line,
        "measured": None if choice.measured is None else asdict(choice.measured),
        "step": None if choice.time is None else asdict(choice.time),
        "between_nbytes": round(choice.between_nbytes),
        "sent_nbytes": choice.plan.sent_nbytes,
        "in_series": choice.plan.in_series,
        "memory_nbytes": choice.held_nbytes(workload),
        "kept_nbytes": asdict(choice.memory),
        "break_even_nbytes_per_s": choice.break_even,
    }


def _everything(found: Sequence[Any], workload: Any, situation: Any, verdict: Any, sources: str) -> dict[str, Any]:
    """The output of ``--json``."""
    return {
        "answer": verdict.answer,
        "advice": verdict.choice.line if verdict.answer == "use" else None,
        "sentence": verdict.sentence,
        "gain": None if verdict.gain is None else asdict(verdict.gain),
        "inputs": {
            "parameters": workload.numel,
            "nodes": workload.nodes,
            "ranks_per_node": workload.on_a_node,
            "tensor_parallel": workload.tensor_parallel,
            "compared_with": workload.baseline,
            "held_nbytes_per_parameter": workload.held_per_param,
            "memory_nbytes": situation.memory_nbytes,
            "memory_source": situation.memory_source,
            "figures": [asdict(each) for each in situation.figures],
            "sources": sources,
        },
        "choices": [_as_dict(each, workload) for each in found],
    }


def _title(workload: Any) -> str:
    parts = "" if workload.tensor_parallel == 1 else f" on each of {workload.tensor_parallel} tensor-parallel ranks"
    return f"{_rounded(workload.numel / 1e6)} million parameters{parts}, {workload.nodes} x {workload.on_a_node} ranks"


def _table(found: Sequence[Any], workload: Any, limit: float | None) -> Table:
    timed = found[0].time is not None
    table = Table(title=_title(workload), box=box.SIMPLE, padding=(0, 0), show_edge=False)  # fits into 80 columns
    table.add_column("set-up", no_wrap=True)
    columns = ["step, s", f"x {workload.baseline}", "pays to\nGbit/s"] if timed else []
    for name in [*columns, "sent\nGB", "memory\nGB", "loss, %\nmeasured", "steps\n%"]:
        table.add_column(name, justify="right", no_wrap=True)
    own: dict[str, float] = {}
    for each in found:
        row = []
        if each.time is not None:
            if each.name.endswith(workload.baseline):
                own[each.plan.wrapper] = each.time.seconds
            ratio = own.get(each.plan.wrapper, 0.0) / each.time.seconds
            row = [_step(each.time), f"{ratio:.3g}" if ratio else "", _pays_to(each)]
        held = each.held_nbytes(workload)
        too_much = "!" if limit is not None and held > limit else ""
        costs = ["", ""]
        if (known := each.measured) is not None:
            more_steps = "?" if known.steps is None else f"{known.steps:+.0f}"
            costs = [f"{known.loss:+.1f}±{known.error:.1f}", more_steps]
        table.add_row(
            each.name,
            *row,
            _rounded(each.between_nbytes / 1e9, 2),
            f"{_rounded(held / 1e9)}{too_much}",
            *costs,
        )
    return table


def _step(time: Any) -> str:
    return f"{_rounded(time.seconds)} ({_rounded(time.low, 2)}-{_rounded(time.high, 2)})"


def _pays_to(choice: Any) -> str:
    if not choice.line or not choice.between_nbytes:
        return ""
    if choice.break_even is None:
        return "never"
    return "any" if choice.break_even >= ANY_RATE else f"{choice.break_even * 8 / 1e9:,.0f}"


def _rounded(value: float, digits: int = 3) -> str:
    """To `digits` significant digits, never with a power of ten where it is large: 0.12, 9.9, 1,180."""
    return f"{value:,.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"
