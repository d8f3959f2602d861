"""One model's gradient synchronization on one rank: buckets, state of the methods, carry-over, steps."""
