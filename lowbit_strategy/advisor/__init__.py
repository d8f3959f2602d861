"""Advice before training: the predicted time of a step, its uncertainty, and whether compression pays off. Training
does not import it.
"""
