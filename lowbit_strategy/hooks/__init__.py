"""Where gradients meet methods: threads, streams, buckets, names and checkpointable state live here."""
