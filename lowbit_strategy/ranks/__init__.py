"""Who trains together: nodes, process groups, levels, and this rank's place among them."""
