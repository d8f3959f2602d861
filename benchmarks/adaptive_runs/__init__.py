"""What `benchmarks/adaptive.py` runs: digits, language model, and the ranks they are trained on."""
