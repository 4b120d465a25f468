"""Any runner, in front of a model with adapters: before each batch the model is told whose rows are whose."""

from __future__ import annotations

from typing import Any

from minirad.model.llama import LlamaModel


class AdapterRunner:
    """The given runner, whose model is an AdapterLlama; see parts.Runner."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def launch(self, batch: Any) -> Any:
        """A row belongs to one request until it is launched for another: rows of earlier batches may stay."""
        self._inner.model.names_of_rows.update({request.row: request.lora for request in batch.requests})
        return self._inner.launch(batch)

    def overlap(self, engine: Any) -> Any:
        """A step launched before the last was read is a captured graph, and those have no adapters."""
        return None

    def use(self, model: LlamaModel) -> None:
        """Goes on with other weights of the same shape, and the same adapters."""
        self._inner.use(self._inner.model.with_weights(model))
