"""Corrects Adam's second moment, which compression or a smaller batch enlarges."""
