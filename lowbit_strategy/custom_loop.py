"""Everything that a training loop without a framework calls. `compress` is enough; by hand it is, in this order:

1. `prepare` before the model is wrapped, then `attach_ddp` or `attach_fsdp` after it, which return a `Session`
2. `adapt` for a controller, `monitor` for observation and a record; both take ``session.sync``
3. ``session.load`` of a checkpoint, if there is one
4. ``session.begin_step`` before every backward pass, ``session.end_step`` after every optimizer step
5. ``with session.save(path) as stamp:`` around the writing of each checkpoint, ``session.close`` at the end
"""

from lowbit_strategy.attach.attach import attach_ddp, attach_fsdp
from lowbit_strategy.attach.compress import compress
from lowbit_strategy.attach.prepare import prepare
from lowbit_strategy.attach.session import CHECKPOINT_KEY, Session
from lowbit_strategy.attach.strategy_options import SyncOptions
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.telemetry.adaptive_driver import AdaptiveDriver
from lowbit_strategy.telemetry.custom_loop import LoopClock, MonitorOptions, adapt, control_of, monitor
from lowbit_strategy.telemetry.observe import Observer

__all__ = [
    "CHECKPOINT_KEY",
    "AdaptiveDriver",
    "GradientSync",
    "LoopClock",
    "MonitorOptions",
    "Observer",
    "Session",
    "SyncOptions",
    "adapt",
    "attach_ddp",
    "attach_fsdp",
    "compress",
    "control_of",
    "monitor",
    "prepare",
]
