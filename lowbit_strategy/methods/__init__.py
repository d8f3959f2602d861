"""The methods. Each combines a codec or a selection, a rule for the residual, and a collective."""
