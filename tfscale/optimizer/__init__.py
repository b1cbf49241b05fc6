"""Distributed optimizer and gradient tape, local averaging, and saving of complete state."""
