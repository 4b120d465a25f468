"""Numbers and charts of the KV pool under one name, as notebooks use them: `from viz import kv`.

    kv.pages(state)   kv.usage_points(recording)   kv.request_hits(recording)   kv.spans(recording) ...
    kv.pool_map(state)   kv.usage(recording)   kv.hit_rate(recording)   kv.timeline(recording) ...
    kv.why(recording, "R7")   kv.misses(recording)

The numbers are viz/view's, the charts viz/draw/charts.py's; why a request missed is told by
viz/notebook/reasons.py, and drawn by viz/why.py.
"""

from viz.draw.charts import (
    HOST_LOOKS,
    OWNERS,
    PHASES,
    USAGE,
    KvFigure,
    age_at_eviction,
    hit_rate,
    host_map,
    owner_colour,
    pool_map,
    timeline,
    usage,
)
from viz.notebook.reasons import Why, why
from viz.view.pool import HostPage, PoolPage, host_pages, pages
from viz.view.requests import Lives, RequestHit, Span, request_hits, spans
from viz.view.usage import UsagePoint, usage_points
from viz.view.victims import Eviction, evictions
from viz.why import misses

__all__ = [
    "HOST_LOOKS", "OWNERS", "PHASES", "USAGE", "Eviction", "HostPage", "KvFigure", "Lives", "PoolPage",
    "RequestHit", "Span", "UsagePoint", "Why", "age_at_eviction", "evictions", "hit_rate", "host_map",
    "host_pages", "misses", "owner_colour", "pages", "pool_map", "request_hits", "spans", "timeline", "usage",
    "usage_points", "why",
]  # fmt: skip
