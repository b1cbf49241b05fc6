"""What happened when: events of the engine, clocks, timelines and their file."""
