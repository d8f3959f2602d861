"""Observes training: a step's measurements, step times, the start-up report. It changes nothing."""
