"""`lowbit doctor`: what this machine will use, and what would not work here."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

MIN_TORCH = (2, 11)
_PACKAGES = {"torch": True, "lightning": True, "accelerate": True, "torchmetrics": True, "triton": False}
_OPTIONAL = ("pytorch-lightning", "transformers", "matplotlib", "jinja2")


class Finding(NamedTuple):
    """One thing looked at: ``ok`` serves, ``note`` works with a limit, ``problem`` does not work."""

    level: str
    what: str
    found: str
    advice: str = ""


def doctor(
    strict: Annotated[bool, typer.Option(help="Exit with status 1 if there is a problem.")] = False,
) -> None:
    """Say what this machine will use, and what would not work."""
    findings = list(examine())
    console = Console()
    table = Table(title="lowbit doctor", title_justify="left")
    for column in ("", "what", "found", "advice"):
        table.add_column(column, overflow="fold")
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[red]problem[/]"}
    for finding in findings:
        table.add_row(marks[finding.level], finding.what, finding.found, finding.advice)
    console.print(table)
    problems = sum(finding.level == "problem" for finding in findings)
    console.print(f"{problems} problem{'' if problems == 1 else 's'}")
    if strict and problems:
        raise typer.Exit(1)


def examine() -> Iterator[Finding]:
    """Look at packages, kernels, backends and strategy names, in that order."""
    yield Finding("ok", "Python", platform.python_version())
    yield from _packages()
    yield from _cpu_kernels()
    yield from _gpu_kernels()
    yield from _backends()
    yield from _compiler()
    yield from _strategies()


def _packages() -> Iterator[Finding]:
    for name, required in _PACKAGES.items():
        found = _version(name)
        if found is None:
            level = "problem" if required else "note"
            yield Finding(level, name, "missing", f"pip install {name}" + ("" if required else " (needed on GPUs)"))
        elif name == "torch" and tuple(int(part) for part in found.split(".")[:2]) < MIN_TORCH:
            yield Finding("problem", name, found, f"needs {MIN_TORCH[0]}.{MIN_TORCH[1]} or newer")
        else:
            yield Finding("ok", name, found)
    for name in _OPTIONAL:
        found = _version(name)
        yield Finding("ok" if found else "note", name, found or "not installed", "" if found else "optional")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu_kernels() -> Iterator[Finding]:
    import torch

    from lowbit_strategy.kernels import backends

    level = "ok" if backends.native_available() else "note"
    yield Finding(level, "CPU kernels", backends.describe(torch.device("cpu")))


def _gpu_kernels() -> Iterator[Finding]:
    import torch

    from lowbit_strategy.kernels import backends

    if not torch.cuda.is_available():
        yield Finding("note", "GPU", "none visible to torch", "training runs on CPU")
        return
    name = torch.cuda.get_device_name()
    if not backends.triton_available():
        yield Finding("problem", "GPU kernels", f"{name}, no Triton", "pip install triton")
        return
    yield Finding("ok", "GPU kernels", f"{name}, Triton")


def _backends() -> Iterator[Finding]:
    import torch.distributed as dist

    if not dist.is_available():
        yield Finding("problem", "torch.distributed", "not in this build of torch", "install another build of torch")
        return
    for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())):
        yield Finding("ok" if there else "note", name, "available" if there else "not in this build of torch")


def _compiler() -> Iterator[Finding]:
    import torch._dynamo

    if torch._dynamo.config.optimize_ddp == "python_reducer":
        yield Finding(
            "problem",
            "torch.compile",
            'optimize_ddp="python_reducer"',
            "compiled autograd bypasses communication hooks: set it to True",
        )


def _strategies() -> Iterator[Finding]:
    from lowbit_strategy.reducers.registry import PRESETS

    names = ", ".join(f"{name}_ddp, {name}_fsdp" for name in sorted(PRESETS))
    yield Finding("ok", "strategy names", names)
