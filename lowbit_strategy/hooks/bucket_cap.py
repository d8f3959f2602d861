"""The default size of DDP's buckets."""

from __future__ import annotations

import torch

# The size of compressed buckets. On gloo, several smaller buckets fill a slow link better than DDP's: their exchanges
# overlap each other and backward; measured from 2 to 25 at 200 Mbit/s and 1 Gbit/s: docs/benchmarks.md. On
# accelerators, each bucket costs a fixed time on the host, so there are fewer and larger ones.
BUCKET_CAP_MB = {"cpu": 8, "cuda": 128}


def default_bucket_cap_mb(device: torch.device) -> int:
    """The default size of DDP's buckets on `device`."""
    return BUCKET_CAP_MB["cpu" if device.type == "cpu" else "cuda"]
