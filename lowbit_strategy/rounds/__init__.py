"""Local steps between synchronizations: anchors, turns, and what each rank has of its own."""
