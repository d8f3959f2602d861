"""Corrects Adam's second moment for what compression, or a smaller batch, adds to it."""
