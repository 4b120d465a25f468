"""The API that the world speaks, in front of the engine: `python -m minirad serve` (the extra `serve`).

    app.py        HTTP: routes, keys, limits, streams       (asyncio; never waits for the engine)
    protocol.py   a body becomes a request, or all that is wrong with it; prompts.py, asked.py: its tokens
    replies.py    what the engine says becomes JSON
    service.py    the seam: any thread submits, the engine's thread takes, steps and hands out
    likeliest.py  top_logprobs: the k likeliest tokens of a step, for those who ask
    metrics.py    what Prometheus reads; command.py, connections.py: the process around it

Nothing here is imported by who does not serve, and nothing here decides what runs: the scheduler does.
"""
