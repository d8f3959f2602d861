"""Advice before training: what a step would take, with what certainty, and whether compression pays. Training does not
import it.
"""
