"""Runs controllers and monitors on an engine: measures what they ask for, and applies what controllers decide."""
