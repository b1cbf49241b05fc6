"""From reduced gradients to new parameters: the whole update, or this rank's part of it."""
