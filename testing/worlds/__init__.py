"""Ranks without processes: the product's own engines and methods over communicators that copy.

`simulated` has W ranks that take turns, `threaded` W ranks in threads (for what waits in the middle of a step),
`two_level` several ranks per node in threads, on two levels, `one_tensor` one parameter on W simulated ranks, `single`
one rank, `echo` one rank whose peers send what it sends. Real processes: `testing.processes.ranks`. Benchmarks that
measure quality and not time use `simulated` and `threaded` too.
"""
