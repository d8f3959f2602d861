"""Base classes and shared pieces of methods."""
