"""Attaching compression to a model. Every framework's adapter calls these functions, in this order:

1. `prepare.prepare` before the model is wrapped: validates, and all ranks compare their settings
2. wrap the model (DDP or FSDP2), then `ddp.attach_ddp` or `fsdp.attach_fsdp`
3. `Session.begin_step` before every backward pass, `Session.end_step` after every optimizer step
4. `Session.save`, `load` and `resume` with the framework's checkpoints; `Session.finish` and `Session.close` at the end
"""
