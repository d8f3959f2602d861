"""Everything that a training loop of one's own calls, in this order:

1. `prepare` before the model is wrapped, then `attach_ddp` or `attach_fsdp` after it, which return an `Attached`
2. `adapt` for a controller, `monitor` for observation and a record; both take ``attached.sync``
3. ``attached.load`` of a checkpoint, if there is one
4. in every step ``attached.set_loss_scale`` before backward (with a loss scaler only) and ``attached.end_step`` after
   the optimizer
5. ``attached.save`` before each checkpoint, ``attached.close`` at the end
"""

from lowbit_strategy.hooks.attach import attach_ddp, attach_fsdp, prepare
from lowbit_strategy.hooks.attached import CHECKPOINT_KEY, Attached
from lowbit_strategy.hooks.sync_options import SyncOptions
from lowbit_strategy.telemetry.custom_loop import LoopClock, adapt, control_of, monitor
from lowbit_strategy.telemetry.monitor_options import MonitorOptions

__all__ = [
    "CHECKPOINT_KEY",
    "Attached",
    "LoopClock",
    "MonitorOptions",
    "SyncOptions",
    "adapt",
    "attach_ddp",
    "attach_fsdp",
    "control_of",
    "monitor",
    "prepare",
]
