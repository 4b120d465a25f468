"""A model's tokenizer without transformers, where it is nothing but its tokenizer.json.

Importing transformers takes half as long as importing torch, and most callers want only `encode` and
`decode`. A `PlainTokenizer` answers these, and a few names more, by the library that transformers asks.
For anything else transformers' own tokenizer is loaded, and from then on answers all. Which folders are that
plain is decided narrowly: where a file says more than is understood here, `plain_tokenizer` knows none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")  # of transformers 4 and 5
_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_UNDERSTOOD = {
    *_NAMED, "tokenizer_class", "additional_special_tokens", "add_bos_token", "add_eos_token",
    "add_prefix_space", "clean_up_tokenization_spaces", "model_max_length", "chat_template",
}  # fmt: skip
_SAYS_MORE = ("chat_template.jinja", "chat_template.json", "special_tokens_map.json", "added_tokens.json")
_SKIP = {"skip_special_tokens": False}  # what transformers does where nothing is said
_UNKNOWN = object()
_LARGEST = 100_000  # tokens: of larger vocabularies transformers looks for an old fault, and mends it


class PlainTokenizer:
    """Stands for the transformers tokenizer of a folder, which is loaded when more is asked than is known.

    `isinstance` and `pickle` see that one, too.
    """

    def __init__(self, folder: Path, said: Mapping[str, Any], load: Callable[[], Any]) -> None:
        """said: tokenizer_config.json; load: how to get transformers' own."""
        from tokenizers import Tokenizer

        rust: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._load, self._rust = load, rust
        self._known: dict[str, Any] = {
            "encode": self._encode,
            "decode": self._decode,
            "convert_ids_to_tokens": self._convert_ids_to_tokens,
            "backend_tokenizer": rust,
            "added_tokens_decoder": rust.get_added_tokens_decoder(),
            "name_or_path": str(folder),
            "chat_template": said.get("chat_template"),
        }
        for name in ("bos_token", "eos_token"):
            token = said.get(name)
            self._known |= {name: token, f"{name}_id": None if token is None else rust.token_to_id(token)}

    @cached_property
    def _whole(self) -> Any:
        """Transformers' own. It may be changed, so from now on it is the only one that is asked."""
        whole = self._load()
        self._known.clear()
        return whole

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also what is asked of every object: nothing is loaded for it
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        known = self._known.get(name, _UNKNOWN)
        return getattr(self._whole, name) if known is _UNKNOWN else known

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._whole, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._whole, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._whole(*arguments, **options)

    def __len__(self) -> int:
        return int(self._rust.get_vocab_size()) if self._known else len(self._whole)

    def __repr__(self) -> str:
        return repr(self._whole)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._whole.__reduce_ex__(protocol)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # what `isinstance` asks where the type itself does not fit
        return type(self._whole)

    # ------------------------------------------------------------ what is known

    def _encode(self, *given: Any, **options: Any) -> Any:
        if [type(each) for each in given] != [str] or options.keys() - {"add_special_tokens"}:
            return self._whole.encode(*given, **options)
        return self._rust.encode(*given, **options).ids

    def _decode(self, *given: Any, **options: Any) -> Any:
        tidy, known = options.get("clean_up_tokenization_spaces"), {"clean_up_tokenization_spaces", *_SKIP}
        if [type(each) for each in given] != [list] or tidy or options.keys() - known:
            return self._whole.decode(*given, **options)
        (ids,), skip = given, {**_SKIP, **{name: options[name] for name in options.keys() & _SKIP}}
        if ids and isinstance(ids[0], list):
            return [self._rust.decode(each, **skip) for each in ids]
        return self._rust.decode(ids, **skip)

    def _convert_ids_to_tokens(self, *given: Any, **options: Any) -> Any:
        if [type(each) for each in given] != [int] or options:
            return self._whole.convert_ids_to_tokens(*given, **options)
        return self._rust.id_to_token(*given)


def plain_tokenizer(folder: Path, load: Callable[[], Any]) -> PlainTokenizer | None:
    """The tokenizer of a folder whose files say nothing that is not understood here; else None.

    load: how to get transformers' own.
    """
    try:
        said = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        file = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        return PlainTokenizer(folder, said, load) if _is_understood(folder, said, file) else None
    except Exception:  # whatever is wrong with the files: transformers says it
        return None


def _is_understood(folder: Path, said: Mapping[str, Any], file: Mapping[str, Any]) -> bool:
    """Whether transformers' tokenizer would be that of tokenizer.json, with nothing added or changed."""
    special = {each["content"] for each in file["added_tokens"] if each["special"]}
    named = [said[name] for name in _NAMED if said.get(name) is not None]
    adds = [said[name] for name in ("add_bos_token", "add_eos_token") if name in said]
    return (
        said["tokenizer_class"] in PLAIN_CLASSES
        and said.keys() <= _UNDERSTOOD
        and special.issuperset([*named, *(said.get("additional_special_tokens") or ())])
        and not any(adds)
        and not said.get("add_prefix_space")
        and said["clean_up_tokenization_spaces"] is False
        and isinstance(said.get("chat_template"), str | None)
        and file["truncation"] is None
        and file["padding"] is None
        and (file["post_processor"] is None or not adds)
        and len(file["model"]["vocab"]) + len(file["added_tokens"]) <= _LARGEST
        and not any((folder / name).exists() for name in _SAYS_MORE)
    )
