"""What other layers know about a model: parameters, roles, FSDP2 sharding, meshes, the handshake of ranks."""
