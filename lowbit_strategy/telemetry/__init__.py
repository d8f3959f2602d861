"""Observes training: a step's measurements, and the way to the start-up report. It changes nothing."""
