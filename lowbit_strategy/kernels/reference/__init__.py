"""The definition of every kernel, in plain PyTorch: read these first, the fast paths are tested against them."""
