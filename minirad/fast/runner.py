"""The runner that uses what this folder has: a faster model, captured steps, tokens drawn on the device."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from minirad.attention.metadata import AttentionMetadata
from minirad.config import EngineConfig
from minirad.fast.flashinfer import FlashInferAttention
from minirad.fast.fused_llama import FusedLlama, faster
from minirad.fast.graphs import DecodeGraphs
from minirad.fast.overlap import Overlap
from minirad.fast.sampling import DrawnOnDevice
from minirad.kv.kv_pool import KVPool
from minirad.model.llama import LlamaModel
from minirad.runner import Computed, TorchRunner
from minirad.schedule.req_to_token import ReqToTokenPool
from minirad.schedule.scheduler import Batch

__all__ = ["GraphRunner"]


class GraphRunner(TorchRunner):
    """Replays captured decode steps where they are possible; everything else is computed in the plain way."""

    def __init__(
        self, model: LlamaModel, pool: KVPool, attention: Any, rows: ReqToTokenPool, config: EngineConfig
    ) -> None:
        super().__init__(model, pool, attention, rows, config)
        self._config = config
        self.graphs: DecodeGraphs | None = None
        self.use(model)

    def use(self, model: LlamaModel) -> None:
        """Goes on with other weights of the same shape: what was captured used the old ones."""
        super().use(model)
        self.faster = faster(self.model)
        config, possible = self._config, DecodeGraphs.possible(self.faster, self.attention)
        if config.cuda_graphs and not possible:
            raise ValueError("cuda_graphs=True: FlashInfer and fused kernels (Triton) are needed, on a GPU")
        self.graphs = None
        if possible and config.cuda_graphs is not False:
            fused, attention = cast(FusedLlama, self.faster), cast(FlashInferAttention, self.attention)
            self.graphs = DecodeGraphs(fused, self.pool, attention, self.rows, self.page_size, config.cascade)

    def forward(self, token_ids: Tensor, metadata: AttentionMetadata, logit_index: Tensor) -> Tensor:
        return self.faster.forward(token_ids, metadata, self.pool, self.attention, logit_index)

    def overlap(self, engine: Any) -> Overlap:
        return Overlap(engine)

    def launch(self, batch: Batch) -> Computed:
        if self.graphs is not None:
            if batch.kind == "decode" and self.graphs.fits(batch.requests):
                output = self.graphs.run(batch.requests)
                return DrawnOnDevice(batch, output.logits, list(range(len(batch.requests))), output.greedy)
            self.rows.rewritten.update(request.row for request in batch.requests)
        computed = super().launch(batch)
        return DrawnOnDevice(batch, computed.logits, computed.last)
