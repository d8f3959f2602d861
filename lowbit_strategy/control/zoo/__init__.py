"""Rarely used controllers, one per file."""
