"""Runs controllers and monitors on an engine: takes the requested measurements, and applies controllers' decisions."""
