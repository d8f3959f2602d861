"""`memory=`: what compression keeps, and what of it fits."""
