"""Measurements to be repeated: `python -m minirad bench ...`. Imports no torch by itself."""
