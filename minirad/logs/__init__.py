"""Request logs as people have them: OpenAI, Anthropic, ShareGPT, Mooncake, and agents' transcripts.

reader = LogReader("requests.jsonl.gz")
for request in reader: ...               # LoggedRequest: where, parts of its prompt, reply, session, ...
for each in tokenized(reader, PromptTokenizer()): ...   # with token ids, and where each part ends
print(*reader.summary(), sep="\\n")       # what was left out, and what was not understood
"""

from minirad.logs.reader import FORMATS, KINDS, LogReader, detect
from minirad.logs.request import LeftOut, LoggedRequest, Part, Usage
from minirad.logs.tokens import PromptTokenizer, Tokenized, tokenized

__all__ = [
    "FORMATS",
    "KINDS",
    "LeftOut",
    "LogReader",
    "LoggedRequest",
    "Part",
    "PromptTokenizer",
    "Tokenized",
    "Usage",
    "detect",
    "tokenized",
]
