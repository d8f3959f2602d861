"""Methods that send a factorisation."""
