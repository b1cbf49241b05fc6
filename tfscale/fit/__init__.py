"""Coordination of the ranks in one `fit`: before it, in each step, and at its end."""
