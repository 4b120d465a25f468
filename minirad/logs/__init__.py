"""Request logs as people have them: OpenAI, Anthropic, ShareGPT, Mooncake, and agents' transcripts.

    reader = LogReader("requests.jsonl.gz")
    for request in reader: ...        # LoggedRequest: where, parts of the prompt, reply, time, session, namespace
    for line in reader.summary(): ... # what was left out, and what was not understood
"""

from minirad.logs.request import LeftOut, LoggedRequest, Part, Usage

__all__ = ["LeftOut", "LoggedRequest", "Part", "Usage"]
