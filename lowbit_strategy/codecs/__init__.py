"""Codecs turn floats into bytes and back. They know no ranks."""
