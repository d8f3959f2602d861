"""`memory=`: what compression keeps has to fit."""
