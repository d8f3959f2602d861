"""The version, for handshakes and checkpoints."""

__version__ = "0.1.0"
