"""Hooks that pass gradients and weights of DDP and FSDP2 to the engine. Threads and streams live here."""
