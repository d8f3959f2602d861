"""Rarely used compressors, one per file. No page recommends one, and none is chosen automatically."""
