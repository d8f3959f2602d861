"""The user's model as other layers see it: parameters, roles, FSDP2 sharding, meshes, the handshake of ranks."""
