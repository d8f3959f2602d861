"""Observes training: measurements of steps, and access to the start-up report. It changes nothing."""
