"""Local SGD: groups of ranks that train apart, and the averages of their models."""
