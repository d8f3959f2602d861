"""`intra=`: codes in the place of exact gradients inside a node."""
