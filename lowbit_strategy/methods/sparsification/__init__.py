"""Methods that send some of the elements."""
