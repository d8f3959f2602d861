"""Gradient synchronization of one model on one rank: buckets, methods' state, carry-over, steps."""
