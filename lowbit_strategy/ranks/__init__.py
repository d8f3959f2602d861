"""Which ranks train together: nodes, levels, process groups, and this rank's place among them."""
