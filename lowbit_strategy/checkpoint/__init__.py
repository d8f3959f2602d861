"""Saves and restores state across restarts: capture, files next to a checkpoint, resuming on all ranks."""
