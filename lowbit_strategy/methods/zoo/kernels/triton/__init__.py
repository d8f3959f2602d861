"""The zoo's kernels for GPUs, imported only when a tensor is on one."""
