"""`lowbit doctor`: reports what this machine will use and what would not work, or what a script would compress."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lowbit_strategy import autoload
from lowbit_strategy.leaves import RULES, need
from lowbit_strategy.register import COMPRESSORS
from lowbit_strategy.version import __version__

ENTRY = {"group": "torch.backends", "name": "lowbit_strategy"}  # the entry point that `import torch` calls

TESTED = {"torch": "2.14", "lightning": "2.6", "accelerate": "1.15", "transformers": "5.23"}  # the newest releases
_OPTIONAL = {  # and their purpose
    "triton": "needed on GPUs: comes with PyTorch's builds for CUDA",
    "pytorch-lightning": "only for scripts that import pytorch_lightning",
    "transformers": "only for the Hugging Face Trainer",
    "matplotlib": "only for lowbit report: pip install 'lowbit-strategy[report]'",
    "jinja2": "only for lowbit report: pip install 'lowbit-strategy[report]'",
}
TRITON_ADVICE = (
    "install PyTorch's build for CUDA (https://pytorch.org/get-started/locally), which includes a matching Triton"
)
# Releases that steal credentials when they are imported. The same code is distributed under several names.
_MALICIOUS = SpecifierSet("!=2.6.2,!=2.6.3")
_LIGHTNING = ("lightning", "pytorch-lightning", "lightning-fabric")
_ADVISORY = (
    "malicious release (GHSA-w37p-236h-pfx3): uninstall it, install 2.6.4 or newer, and replace every credential that"
    " this machine holds"
)


class Finding(NamedTuple):
    """One finding: ``ok`` works, ``note`` works with a limit, ``problem`` does not work."""

    level: str
    what: str
    found: str
    advice: str = ""


def doctor(
    script: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SCRIPT [ITS ARGUMENTS]...]",
            help="Needs --config. It runs until it prepares its model; what would be compressed is reported, and"
            " nothing is trained.",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A configuration file of Accelerate with a lowbit_config section: is it right?")
    ] = None,
    num_processes: Annotated[
        int | None, typer.Option("--num-processes", "--num_processes", min=1, help="Instead of the file's.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="The script is a module, as for python -m.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with status 1 if there is a problem.")] = False,
) -> None:
    """Report what this machine will use, and what would not work. With a script: what would be compressed."""
    if script or config is not None:
        _of_job(config, num_processes, script, module=module)
        return
    findings = list(examine())
    console = Console()
    table = Table(title="lowbit doctor", title_justify="left")
    for column in ("", "what", "found", "advice"):
        table.add_column(column, overflow="fold")
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[red]problem[/]"}
    for finding in findings:
        table.add_row(marks[finding.level], finding.what, escape(finding.found), escape(finding.advice))
    console.print(table)
    problems = sum(finding.level == "problem" for finding in findings)
    console.print(f"{problems} problem{'' if problems == 1 else 's'}")
    if strict and problems:
        raise typer.Exit(1)


def _of_job(config: Path | None, num_processes: int | None, script: list[str] | None, *, module: bool) -> None:
    """Report on a job's configuration file, and with a script on what would be compressed.

    Raises:
        ValueError: The configuration file does not exist or is wrong.
        MissingPart: The part that reads configuration files is not installed.
    """
    need("lowbit_strategy.config_file", "lowbit doctor --config")
    if config is None:
        raise ValueError("a script needs --config, the configuration file that it will be launched with")
    from lowbit_strategy.control.base import describe
    from lowbit_strategy.doctor.dry_run import dry_run, read_job

    plugin, planned = job = read_job(config, num_processes)
    if script:
        dry_run(job, script, module=module)
    ranks = f"{planned.world_size} process{'' if planned.world_size == 1 else 'es'}"
    print(f"{config}: {describe(plugin.compressor)}, {'FSDP2' if planned.scatter else 'DDP'}, {ranks}")
    if planned.world_size == 1:
        print("one process sends no gradients, so nothing would be compressed (num_processes)")


def examine() -> Iterator[Finding]:
    """Look at packages, kernels, backends and strategy names, in that order."""
    yield Finding("ok", "lowbit-strategy", __version__)
    yield Finding("ok", "Python", platform.python_version())
    yield from _packages()
    yield from _newer()
    yield from _cpu_kernels()
    yield from _gpu_kernels()
    yield from _backends()
    yield from examine_far_links()
    yield from _strategies()
    yield _autoloading()


def _packages() -> Iterator[Finding]:
    bounds = _bounds()
    if not bounds:
        yield Finding("note", "requirements", "unknown: lowbit-strategy is not installed", "pip install .")
    for name in dict.fromkeys((*bounds, *_OPTIONAL, *_LIGHTNING)):
        found, bound = _version(name), bounds.get(name, SpecifierSet())
        if found is not None and name in _LIGHTNING and not _MALICIOUS.contains(found, prereleases=True):
            yield Finding("problem", name, found, _ADVISORY)
        elif found is not None and not bound.contains(found, prereleases=True):
            yield Finding("problem", name, found, f"needs {name}{bound}")
        elif found is not None:
            yield Finding("ok", name, found)
        elif name in _OPTIONAL:
            yield Finding("note", name, "not installed", _OPTIONAL[name])
        elif name in bounds:
            yield Finding("problem", name, "missing", f"pip install '{name}{bound}'")


def _newer() -> Iterator[Finding]:
    """Check packages whose internal names this one uses, since newer releases may have moved them."""
    for name, newest in TESTED.items():
        found = _version(name)
        if found is not None and Version(found).release[:2] > Version(newest).release[:2]:
            yield Finding("note", name, f"{found}, tested up to {newest}", "compare some steps with uncompressed ones")


def _bounds() -> dict[str, SpecifierSet]:
    """The requirements with which this package was installed, including those of the extras in `_OPTIONAL`."""
    try:
        texts = requires("lowbit-strategy") or ()
    except PackageNotFoundError:
        return {}
    bounds = {}
    for each in map(Requirement, texts):
        name = canonicalize_name(each.name)
        if name in _OPTIONAL or each.marker is None or each.marker.evaluate({"extra": ""}):
            bounds[str(name)] = each.specifier
    return bounds


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu_kernels() -> Iterator[Finding]:
    import torch

    from lowbit_strategy.kernels import backends, native

    try:
        found = backends.describe(torch.device("cpu"))
    except RuntimeError as error:
        yield Finding("problem", "CPU kernels", str(error), f"change or unset {backends.OVERRIDE}")
        return
    yield Finding("ok" if native.available() else "note", "CPU kernels", found)


def _gpu_kernels() -> Iterator[Finding]:
    import torch

    from lowbit_strategy.kernels import backends

    if not torch.cuda.is_available():
        yield Finding("note", "GPU", "none visible to torch", "training runs on CPU")
        return
    name = torch.cuda.get_device_name()
    if not backends.triton_available():
        yield Finding("problem", "GPU kernels", f"{name}, no Triton", TRITON_ADVICE)
        return
    yield Finding("ok", "GPU kernels", f"{name}, Triton")


def _backends() -> Iterator[Finding]:
    import torch.distributed as dist

    if not dist.is_available():
        yield Finding("problem", "torch.distributed", "not in this build of torch", "use a different build of torch")
        return
    for name, available in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())):
        yield Finding("ok" if available else "note", name, "available" if available else "not in this build of torch")


_TCP = Path("/proc/sys/net/ipv4")
_FAR = 1e9 * 0.15 / 8  # bytes in flight at 1 Gbit/s and a round trip of 150 ms
_FAR_PAGE = "docs/far-links.md"


def examine_far_links(root: Path = _TCP) -> Iterator[Finding]:
    """Check socket buffers and slow start after idle, if the kernel shows them."""
    if (text := _read(root / "tcp_rmem")) is not None:
        largest = int(text.split()[-1])
        advice = f"for a link of R bit/s with a round trip of T seconds it must be R * T / 8 bytes: {_FAR_PAGE}"
        yield _judged("net.ipv4.tcp_rmem", f"at most {largest / 1e6:.1f} MB", largest < _FAR, advice)
    if (text := _read(root / "tcp_slow_start_after_idle")) is not None:
        advice = f"far links: every step begins slowly; sysctl -w net.ipv4.tcp_slow_start_after_idle=0: {_FAR_PAGE}"
        yield _judged("slow start after idle", "off" if text == "0" else "on", text != "0", advice)


def _judged(what: str, found: str, noted: bool, advice: str) -> Finding:
    return Finding("note", what, found, advice) if noted else Finding("ok", what, found)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _strategies() -> Iterator[Finding]:
    compressors = ", ".join(sorted(COMPRESSORS))
    yield Finding("ok", "compressors", compressors, "strategies: loco_ddp, loco_fsdp, loco_hsdp, ...")
    yield Finding("ok", "local steps", ", ".join(sorted(RULES)), "strategies: diloco_ddp, diloco_hsdp, ...")


def why_not_found() -> str | None:
    """The reason why new processes will not find this package by themselves, or None if they will."""
    for switch in (autoload.SWITCH, "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        if os.environ.get(switch, "1") == "0":
            return f"{switch}=0 turns it off"
    return None if entry_points(**ENTRY) else "lowbit-strategy is not installed here: pip install it"


def _autoloading() -> Finding:
    """Check in a new process whether a script that never imports this package has its names."""
    advice = "until then: import lowbit_strategy in the script, or python -m lowbit_strategy.run"
    if (why := why_not_found()) is not None:
        return Finding("note", "autoloading", why, advice)
    code = "import sys, torch; print(sys.modules['lowbit_strategy'].__path__[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        return Finding("problem", "autoloading", done.stderr.strip().splitlines()[-1], advice)
    found = Path(done.stdout.splitlines()[-1])
    if found.resolve() != Path(autoload.__file__).parent.resolve():
        return Finding("problem", "autoloading", f"finds another installation, {found}", "uninstall one of them")
    return Finding("ok", "autoloading", "import torch makes the names known", f"{autoload.SWITCH}=0 turns it off")
