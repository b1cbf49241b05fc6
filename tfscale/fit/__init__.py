"""What keeps the ranks of one `fit` together: before it, in each step, and at its end."""
