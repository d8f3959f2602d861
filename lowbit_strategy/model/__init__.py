"""What the other layers know about a model: parameters and their roles, FSDP2 sharding, meshes, the handshake of
ranks.
"""
