"""What sparse methods are made of."""
