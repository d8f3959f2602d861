"""Local steps between synchronisations: anchors, turns, and what each rank has of its own."""
