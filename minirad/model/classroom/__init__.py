"""The classroom Llama: a tiny model that knows its lessons and nothing else.

`corpus` writes the lessons, `train` makes a model from them, `score` examines it, and `weights/`
holds the model that travels with this package as an ordinary Hugging Face directory. `train_head` makes
the draft head in `draft_head/` for it.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["ADAPTERS", "DRAFT_HEAD", "WEIGHTS"]

WEIGHTS = Path(__file__).parent / "weights"
"""Directory of the committed model."""

DRAFT_HEAD = Path(__file__).parent / "draft_head"
"""Directory of the draft head that was trained for it."""

ADAPTERS = Path(__file__).parent / "adapters"
"""Directory of its committed adapters, each in a folder of its name."""
