"""Events of the engine, clocks, timelines and their file."""
