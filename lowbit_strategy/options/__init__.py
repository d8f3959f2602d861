"""How options are written: which names and types a configuration takes, and what its errors suggest."""
