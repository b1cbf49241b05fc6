"""How gradients become updates: one file per strategy."""
