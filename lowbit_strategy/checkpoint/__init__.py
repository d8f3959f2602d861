"""What survives a restart: capturing state, files next to a checkpoint, restoring on all ranks together."""
