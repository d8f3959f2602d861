"""What the other layers know of a model: parameters and their roles, FSDP2 sharding, agreement of the ranks."""
