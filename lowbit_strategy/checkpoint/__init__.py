"""What survives a restart: capturing state, files beside a checkpoint, restoring on all ranks together."""
