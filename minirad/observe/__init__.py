"""What the engine tells: events, recordings of them, and states replayed from recordings."""
