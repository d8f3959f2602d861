"""Codecs: floats to bytes and back, without ranks or state."""
