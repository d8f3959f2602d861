"""One model's gradient synchronisation on one rank: buckets, state of the methods, carry-over, steps."""
