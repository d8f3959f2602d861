"""The common steps of attaching to DDP and to FSDP2: compare ranks, make the engine, make the session."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.attach.pace import EveryStep, Pace
from lowbit_strategy.attach.prepare import PreparedModel, settings_of
from lowbit_strategy.attach.session import Hook, Session
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.inform import inform
from lowbit_strategy.methods._base.chooser import Chooser
from lowbit_strategy.methods.dense import Dense
from lowbit_strategy.model.fingerprint import settings_facts
from lowbit_strategy.model.handshake import handshake
from lowbit_strategy.model.module_layout import ModuleLayout
from lowbit_strategy.model.parallel_dims import global_shape, model_group
from lowbit_strategy.model.parameters import named_parameters
from lowbit_strategy.ranks.ranks import Ranks
from lowbit_strategy.telemetry.startup_report import startup_report

ONE_REPLICA = (
    "lowbit_strategy: one replica: all ranks shard one model, and gradients inside a replica are added up exactly, so"
    " nothing is compressed, and no steps are local. Start several nodes. To try it on one node, give a smaller"
    " shard_size, or start the ranks with a smaller LOCAL_WORLD_SIZE"
)
_log = logging.getLogger("lowbit_strategy")


def warn_of_one_rank() -> None:
    """Warn that there is only one rank, once per run, with the same message in all frameworks."""
    _log.warning("lowbit_strategy: one rank: gradients are not sent, so nothing is compressed")


def compare_with_all(
    module: nn.Module,
    prepared: PreparedModel,
    group: dist.ProcessGroup | None,
    device: torch.device,
    mesh: DeviceMesh | None,
    *,
    has_scaler: bool,
) -> dist.ProcessGroup | None:
    """Compare everything except parameters, which only the ranks of `group` share, and return the group of all ranks
    that hold part of the model.
    """
    everyone = model_group(module, group, device, mesh)
    facts = settings_facts(prepared.compressor, scatter=prepared.scatter, settings=settings_of(prepared.options))
    handshake(facts | {"gradient scaler": "one" if has_scaler else "none", "type of device": device.type}, everyone)
    return everyone


@torch.inference_mode(False)  # state made in inference mode could not change in training
def make_engine(
    module: nn.Module,
    prepared: PreparedModel,
    ranks: Ranks,
    device: torch.device,
    *,
    has_scaler: bool,
    modules: Mapping[str, ModuleLayout] | None = None,
    others: Mapping[str, Ranks] | None = None,
) -> tuple[PreparedModel, GradientSync]:
    """Fit a prepared model to its ranks and their memory, and make its engine. A single rank only keeps the residuals
    that a checkpoint contains. `modules`: the parameters that FSDP2 gathers together. `others`: see `GradientSync`.
    """
    all_ranks = list(dict.fromkeys((ranks, *(others or {}).values())))
    for part in prepared.parts:
        prepared = part.on_meshes(prepared, module, all_ranks)
    fewest = min(all_ranks, key=lambda each: each.world_size)  # they keep most
    if not fewest.alone:
        for part in prepared.parts:
            prepared = part.fitted(prepared, fewest, device, modules or {})
    options = prepared.options
    sync = GradientSync(
        Dense() if ranks.alone else prepared.compressor,
        prepared.specs,
        ranks,
        device,
        sharded=prepared.wrapper == "fsdp",
        others=others,
        seed=options.seed,
        skips_overflow=has_scaler,
        keeps_copies=options.rollback,
    )
    check_whole_model(module, sync)
    if ranks.world_size == 1 and not ranks.comes_and_goes:
        warn_of_one_rank()
    elif ranks.alone and ranks.logs:  # replicas that come and go never are
        _log.warning("%s", ONE_REPLICA)
    return prepared, sync


def make_session(
    model: nn.Module,
    prepared: PreparedModel,
    sync: GradientSync,
    *,
    hook: Hook | None = None,
) -> Session:
    """Make the session around the engine of a model, which may be wrapped in DDP."""
    module = model.module if isinstance(model, DistributedDataParallel) else model
    begun: list[Pace | None] = []
    if not sync.ranks.alone:
        if isinstance(prepared.compressor, Chooser):
            begun.append(prepared.compressor.begin(prepared, sync, model, hook))
        begun += [part.attach(sync, module, prepared) for part in prepared.parts]
    pace = next((each for each in begun if each is not None), EveryStep())
    session = Session(sync, module, prepared.options, pace, hook=hook)
    _report(sync)
    if isinstance(model, DistributedDataParallel):
        session.close_with(model)
    session.pace.attached(session, model)
    return session


def _report(sync: GradientSync) -> None:
    """Log the start-up report. Called last, because only then is the memory for messages known."""
    if sync.ranks.peers.world_size == 1 or isinstance(sync.compressor, Chooser):
        return
    if sync.ranks.logs and (report := startup_report(sync)):
        inform("%s", report)


def check_whole_model(module: nn.Module, sync: GradientSync) -> None:
    """Raise a ValueError if a method selects from all of a rank's parameters, while tensor or expert parallelism gives
    ranks different parts of some parameters and copies of others.
    """
    if sync.ranks.everyone.world_size == sync.ranks.world_size:
        return
    for name, param in named_parameters(module):
        assignment = sync.state.assignments.get(name)
        if assignment is None or not assignment.method.whole_model:
            continue
        if global_shape(param).numel() == sync.specs[name].whole.numel:
            raise ValueError(
                f"{sync.compressor.name} selects from all parameters of a rank; some differ between tensor-parallel"
                f" ranks, and {name} is the same on all of them, so that they would select different parts of it:"
                " exempt it, or use a compressor that looks at one parameter at a time, such as LoCo()"
            )
