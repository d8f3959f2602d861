"""Adam's second moment without what compression, or a smaller batch, adds to it."""
