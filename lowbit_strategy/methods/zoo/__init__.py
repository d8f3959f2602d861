"""Rarely used compressors, one per file: no page recommends one, and none is chosen automatically."""
