"""What controllers of the zoo measure."""
