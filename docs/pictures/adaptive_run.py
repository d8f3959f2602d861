"""The run that the pages on adaptive compression and monitoring show: the demo's GPT, Accordion between 8 and 2 bits.

Two processes, some minutes: ``python docs/pictures/adaptive_run.py``. It writes ``runs/adaptive/lowbit.jsonl`` beside
this file, which `draw_adaptive.py` draws. Lightning starts the second process by the same command line.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lowbit_strategy.control import Accordion
from lowbit_strategy.lightning import AdaptiveCompression, CompressionMonitor
from lowbit_strategy.methods.registry import from_options, preset
from recipes import demo_train

STEPS, INTERVAL = 300, 20

if __name__ == "__main__":
    folder = Path(__file__).resolve().parent / "runs" / "adaptive"
    controller = Accordion(
        light=from_options("loco", {"bits": 8}),
        heavy=preset("loco2"),
        eta=0.25,
        interval=INTERVAL,
        unit="steps",
    )
    callbacks = [CompressionMonitor(every_n_steps=10, record=folder), AdaptiveCompression(controller, record=folder)]
    demo_train.train(strategy="loco_fsdp", steps=STEPS, seed=0, callbacks=callbacks)
