"""Quantised weights read straight from a GGUF file; on a CPU a step then reads half as many bytes."""
