"""`intra=`: codes instead of exact gradients inside a node."""
