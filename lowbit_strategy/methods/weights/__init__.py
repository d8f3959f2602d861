"""How FSDP2's weights travel from their owners to the other ranks: exactly, as codes, or as codes of differences."""
