"""The distributed optimizer and tape, and the steps around an update."""
