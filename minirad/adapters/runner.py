"""Any runner, in front of a model with adapters: before each batch the model is told whose rows are whose."""

from __future__ import annotations

from typing import Any

from minirad.config import adapter_of
from minirad.model.llama import LlamaModel


class AdapterRunner:
    """The given runner, whose model is an AdapterLlama; see parts.Runner."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def launch(self, batch: Any) -> Any:
        """Computes a batch, with each request's adapter."""
        self.tell(batch)
        return self._inner.launch(batch)

    def tell(self, batch: Any) -> None:
        """Who computes a batch otherwise than by `launch` (speculative/) says this before.

        A row belongs to one request until it is told for another: rows of earlier batches may stay.
        """
        names = {request.row: adapter_of(request.extra_key) for request in batch.requests}
        self._inner.model.names_of_rows.update(names)

    def overlap(self, engine: Any) -> Any:
        """A step launched before the last was read is a captured graph, and those have no adapters."""
        return None

    def use(self, model: LlamaModel) -> None:
        """Goes on with other weights of the same shape, and the same adapters."""
        self._inner.use(self._inner.model.with_weights(getattr(model, "plain", model)))
