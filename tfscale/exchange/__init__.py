"""Exchange strategies, the plans they compile to, and the executor that runs them."""
