"""`max_residual=` and `follows_rate=`: residuals that are bounded, and that follow the learning rate."""
