"""Measurements for the zoo's controllers."""
