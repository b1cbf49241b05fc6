"""When each collective was posted, started and ended."""
