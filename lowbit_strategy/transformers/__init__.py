"""The Hugging Face Trainer: one call on a trainer, before ``trainer.train()``.

trainer = Trainer(model, args, train_dataset=...)
attach(trainer, LoCo(bits=4))
"""

from lowbit_strategy.accelerate.plugin import LowBitPlugin
from lowbit_strategy.transformers.binding import attach

__all__ = ["LowBitPlugin", "attach"]
