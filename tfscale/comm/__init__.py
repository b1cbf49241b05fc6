"""The job, its collectives, and the backends that send messages."""
