"""How long things take: links, coding, optimizers."""
