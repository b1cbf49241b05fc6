"""Who moves the bytes: our engine over MPI, or nobody when there is one process."""
