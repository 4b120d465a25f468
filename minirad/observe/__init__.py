"""What watches an engine and is not needed to run it: descriptions and checks."""
