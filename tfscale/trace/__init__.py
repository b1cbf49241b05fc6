"""Times of a step: events of the engine, clocks, timelines and their file."""
