"""Sparse collectives: what entries look like in messages, and how they are summed."""
