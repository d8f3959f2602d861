"""The same on GPUs; imported only when a tensor is there."""
