"""The job, its collectives, and the backends that move the bytes."""
