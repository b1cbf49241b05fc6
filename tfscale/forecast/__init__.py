"""What a model would gain from more ranks, on a machine that need not be there."""
