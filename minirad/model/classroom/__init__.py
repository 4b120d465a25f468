"""The classroom Llama: a tiny model that knows its lessons and nothing else.

`corpus` writes the lessons, `train` makes a model from them, `score` examines it, and `weights/`
holds the model that travels with this package as an ordinary Hugging Face directory.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["ADAPTERS", "WEIGHTS"]

WEIGHTS = Path(__file__).parent / "weights"
"""Directory of the committed model."""

ADAPTERS = Path(__file__).parent / "adapters"
"""Directory of its committed adapters, each in a folder of its name."""
