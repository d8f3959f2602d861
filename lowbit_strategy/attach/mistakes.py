"""Messages about mistakes in a training loop, which say what to change."""

from __future__ import annotations

from torch import nn

from lowbit_strategy.inform import listed
from lowbit_strategy.model.parameters import named_parameters

MANY_PASSES = 100  # in one step: more than anyone accumulates
NO_STEP_HAS_ENDED = (
    f"{MANY_PASSES} backward passes have come and no step has ended: call session.end_step() after every step, even a"
    " hand-written one (in Lightning trainer.strategy.session.end_step()). Until then nothing is compared or recorded,"
    " no controller decides, and local steps are not synchronized"
)
SHARED_IN_ROUNDS = (
    "compression was attached to another model that shares parameters with this one, and local steps would update them"
    " from two anchors: attach it to one model that holds both, or omit outer=. If one of them is no longer trained,"
    " close its session"
)
MADE_BEFORE_SHARDING = (
    "the optimizer steps no parameter of this model: give it the model's parameters, after fully_shard, which replaces"
    " them"
)
CLIPPED_AFTERWARDS = (
    "{}={} clips the sparse mean gradient after it has left the residual, so the clipped part is lost: raise it, or"
    " clip before compression (DGC(clip_norm=...))"
)
UNFROZEN_UNDER_DDP = (
    "{} was frozen when the model was set up and is trained now, which DDP does not see: set the model up"
    " again after unfreezing, by fabric.setup(module, optimizer), accelerator.prepare(module), or in plain PyTorch"
    " DistributedDataParallel(module) and compress, with the module itself and not with what these returned"
)


def why_nothing_was_sent(module: nn.Module, *, waits: bool) -> str:
    """Explain a first step in which nothing was sent. `waits`: whether DDP waits for all gradients."""
    params = [(name, param) for name, param in named_parameters(module) if param.requires_grad]
    idle = [name for name, param in params if param.grad is None]
    if waits and 0 < len(idle) < len(params):
        return (
            f"the loss does not depend on {listed(idle)}, and DDP waits for all gradients before it"
            " synchronizes: pass find_unused_parameters=True (or a name like loco_ddp_find_unused_parameters_true)"
        )
    return (
        "the optimizer has stepped but no gradient has been synchronized yet. If the first loss was not skipped on"
        " purpose, backward does not reach what was set up"
    )
