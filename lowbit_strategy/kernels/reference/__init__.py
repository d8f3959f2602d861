"""The definition of every kernel in plain PyTorch. Read these first; the fast paths are tested against them."""
