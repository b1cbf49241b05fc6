"""Implementations of the collectives: engine, Horovod, one process."""
