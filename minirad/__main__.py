"""The command line: `python -m minirad --help` lists every command of the project.

Each command imports what it needs when it runs, so that `--help` is instant.
"""

from __future__ import annotations

from minirad import command

if __name__ == "__main__":
    command.end_quietly("minirad")  # before what takes its time to import

import argparse
import contextlib
import dataclasses
import io
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minirad.errors import DiskWarning, RankLost, RanksDiffer
from minirad.options import ADAPTER, add_engine_options, add_sampling_options, engine_config, sampling_params
from minirad.text import TextWarning

if TYPE_CHECKING:
    from minirad.engine import Engine
    from minirad.outputs import GenerationOutput

SYSTEM = "You are a helpful assistant."
# Commands without a model, and their modules: options live beside them, as those of the benchmarks.
WITHOUT_MODEL = {
    "simulate": "simulate", "theorem": "theorem", "kv-events": "fleet.command", "why": "why.command",
    "serve": "server.command", "route": "route.command",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code. A caller's mistake is one line on stderr and 2."""

    def work() -> int:
        parser = _parser()
        args, rest = parser.parse_known_args(argv)
        if hasattr(args, "module"):
            args.rest = rest
        elif rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        with warnings.catch_warnings():
            warnings.showwarning = _told(warnings.showwarning)
            try:
                code: int = args.run(args)
            except (RanksDiffer, RankLost) as error:
                print(f"minirad: {command.one_line(error)}", file=sys.stderr)
                code = 1
        return code

    words = sys.argv[1:] if argv is None else argv
    if os.environ.get("RANK", "0") == "0" or not any(word.split("=")[0] == "--tp" for word in words):
        return command.run("minirad", work)
    return _silently(work)


def _silently(work: Callable[[], int]) -> int:
    """What another rank than 0 does (torchrun, --tp): what it would say, rank 0 says."""
    with contextlib.ExitStack() as silence:
        nowhere = silence.enter_context(open(os.devnull, "w", encoding="utf-8"))
        silence.enter_context(contextlib.redirect_stdout(nowhere))
        silence.enter_context(contextlib.redirect_stderr(nowhere))
        code = command.run("minirad", work)
        time.sleep(5)  # torchrun ends all when one has failed: rank 0 makes the same mistake, and says it
    return code


def _told(usual: Any) -> Any:
    """Shows warnings about texts and the disk as one line; others as usual."""

    def show(message: Any, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, TextWarning | DiskWarning):
            print(f"minirad: {message}", file=sys.stderr)
        else:
            usual(message, category, *place, **more)

    return show


def _parser() -> argparse.ArgumentParser:
    about = command.below("minirad")
    parser = command.Parser(
        prog="python -m minirad", description="See RadixAttention.", epilog=command.listing(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(required=True, metavar="command", help=f"{', '.join(about)} or bench")

    generate = commands.add_parser("generate", description=about["generate"])
    generate.add_argument("prompts", nargs="*", help="one or more prompts")
    generate.add_argument("--file", type=Path, help="a text file with one prompt per line")
    generate.add_argument("--raw", action="store_true", help="send the text as it is, without chat template")
    generate.add_argument("--system", default=SYSTEM, help="system prompt of the chat template")
    generate.add_argument(
        "--together",
        action="store_true",
        help="one batch (default: one after another, so that later ones hit)",
    )
    generate.add_argument("--regex", metavar="PATTERN", help="each reply matches it as a whole")
    generate.add_argument("--json", action="store_true", help="print outputs as JSON")
    generate.add_argument("--record", type=Path, help="write every step to this new .jsonl file")
    generate.set_defaults(run=_generate)

    chat = commands.add_parser("chat", description=about["chat"])
    chat.add_argument("--system", default=SYSTEM)
    chat.add_argument("--record", type=Path, help="write every step to this new .jsonl file")
    chat.set_defaults(run=_chat)
    for talks, who in (
        (generate, f"{ADAPTER}: each prompt is answered under each of them, and not without"),
        (chat, f"{ADAPTER.removesuffix('; repeatable')}: it answers instead of the model alone"),
    ):
        add_sampling_options(talks)
        add_engine_options(talks, who)

    info = commands.add_parser("info", description=about["info"])
    info.add_argument("--json", action="store_true")
    add_engine_options(info)
    info.set_defaults(run=_info)

    bench = commands.add_parser("bench", description="Measure.")
    kinds = bench.add_subparsers(required=True, metavar="what")
    for name, said in command.below("minirad bench").items():
        # Its options are read when it is the one to run.
        kind = kinds.add_parser(name, help=said, add_help=False)
        kind.set_defaults(run=_with_own_options, module=f"bench.{name}", words=f"bench {name}")
    for name, module in WITHOUT_MODEL.items():
        commands.add_parser(name, add_help=False).set_defaults(
            run=_with_own_options, module=module, words=name
        )
    return parser


def _with_own_options(args: argparse.Namespace) -> int:
    module = import_module(f"minirad.{args.module}")
    parser = command.Parser(
        prog=f"python -m minirad {args.words}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    code: int = module.main(parser.parse_args(args.rest))
    return code


def _check_record(path: Path | None, tp: int | None, reads: Iterable[Path] = ()) -> None:
    for file in [] if path is None else [path, *_rank_files(path, tp or 1)]:
        command.may_be_written("--record", file, (".jsonl",), reads, keep=True)


@contextlib.contextmanager
def _recording(engine: Engine, path: Path | None) -> Iterator[None]:
    if path is None:
        yield
        return
    from minirad.observe.recorder import Recorder

    with Recorder(engine, path), _other_ranks(engine, path):
        yield
    print(f"recorded to {path}", file=sys.stderr)


@contextlib.contextmanager
def _other_ranks(engine: Engine, path: Path) -> Iterator[None]:
    """Records the other ranks of an engine of several, each into a file of its own."""
    if engine.config.tp == 1:
        yield
        return
    from minirad import ranks

    recordings = list(ranks.watch(engine))
    try:
        yield
        ranks.unwatch(engine)
    finally:
        for file, recording in zip(_rank_files(path, engine.config.tp), recordings, strict=True):
            recording.save(file)


def _rank_files(path: Path, tp: int) -> list[Path]:
    """Where the recordings of ranks 1, 2, ... go: run.rank1.jsonl beside run.jsonl."""
    return [path.with_name(f"{path.stem}.rank{rank}{path.suffix}") for rank in range(1, tp)]


# ---------------------------------------------------------------------- generate


def _generate(args: argparse.Namespace) -> int:
    prompts = list(args.prompts)
    left_out = 0
    _check_record(args.record, args.tp, () if args.file is None else (args.file,))
    if args.file is not None:
        lines, left_out = _lines(args.file)
        prompts += lines
    if not prompts:
        raise ValueError("no prompt given: say one, or --file with one per line")
    if args.regex is not None and args.dummy_weights:
        raise ValueError("--regex needs a tokenizer, and --dummy-weights have none")
    params = sampling_params(args)
    engine = _engine(args)
    if args.dummy_weights:
        ids = [_numbers(text) for text in prompts]
    else:
        ids = [engine.encode(text) if args.raw else _as_chat(engine, args.system, text) for text in prompts]
    for tokens in ids:  # all are checked before any is run
        engine.check_prompt(tokens, params)
    adapters = [*dict(engine.config.lora)] or [""]
    asked = [(prompt, tokens, lora) for prompt, tokens in zip(prompts, ids, strict=True) for lora in adapters]
    masks = [None if args.regex is None else _regex(engine, args.regex) for _ in asked]
    with _recording(engine, args.record):
        _note(engine)
        outputs = _run(engine, [each[1:] for each in asked], params, masks, together=args.together)
    if args.json:
        records = [
            {"prompt": asked[at][0], "lora": asked[at][2], **dataclasses.asdict(out)} for at, out in outputs
        ]
        print(json.dumps(records, ensure_ascii=False, indent=1))
    else:
        for at, out in outputs:
            _print_output(asked[at][0], asked[at][2], out)
    drafts = getattr(engine, "drafts", None)  # of an engine with --speculative or --jump-forward
    if drafts is not None:
        print(f"[{drafts}]", file=sys.stderr if args.json else sys.stdout)
    if left_out:
        return 2
    return 1 if any(out.finish_reason == "error" for _, out in outputs) else 0


def _lines(path: Path) -> tuple[list[str], int]:
    """The lines of a file that are not blank; those that are no text are named, counted and left out."""
    lines: list[str] = []
    left_out = 0
    for number, raw in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            left_out += 1
            print(f"minirad: {path}, line {number} left out: no UTF-8: {error.reason}", file=sys.stderr)
        else:
            lines += [line] if line.strip() else []
    return lines, left_out


def _engine(args: argparse.Namespace) -> Engine:
    from minirad.engine import Engine

    return Engine(engine_config(args))


def _note(engine: Engine) -> None:
    """Said once it is known that the command runs: of a mistake there is one line."""
    if engine.attention_note:
        print(engine.attention_note, file=sys.stderr)


def _numbers(text: str) -> Any:
    """Token ids as they were typed: random weights have no tokenizer."""
    try:
        return [int(word) for word in text.split()]
    except ValueError:
        raise ValueError(f"dummy weights take token ids such as '1 2 3', got {text!r}") from None


def _as_chat(engine: Engine, system: str, text: str) -> Any:
    from minirad.frontend import ChatSession

    return ChatSession(engine, system).prompt(text)


def _regex(engine: Engine, pattern: str) -> Any:
    """A fresh mask for one reply; ValueError, too, where llguidance is missing."""
    from minirad.grammar import regex_mask

    try:
        return regex_mask(pattern, engine.tokenizer, engine.eos_ids, engine.runner.vocab_size)
    except ModuleNotFoundError as error:
        raise ValueError(str(error)) from error


def _run(
    engine: Engine, asked: list[tuple[Any, str]], params: Any, masks: list[Any], together: bool
) -> list[tuple[int, GenerationOutput]]:
    """Outputs with the number of what was asked: token ids and an adapter."""
    from tqdm import tqdm

    order = {}
    outputs: list[tuple[int, GenerationOutput]] = []
    total = len(asked) * params.n
    with tqdm(total=total, desc="generating", unit="reply", delay=2, leave=False) as bar:
        for at, (tokens, lora) in enumerate(asked):
            order[engine.add_request(tokens, params, token_mask=masks[at], lora=lora)] = at
            while engine.has_work and (not together or at == len(asked) - 1):
                for out in engine.step().finished:
                    outputs.append((order[out.request_id], out))
                    bar.update()
    return sorted(outputs, key=lambda item: (item[0], item[1].index))


def _print_output(prompt: str, lora: str, out: GenerationOutput) -> None:
    under = f" (adapter {lora})" if lora else ""
    sample = f" (sample {out.index})" if out.index else ""
    print(f"> {prompt}{under}{sample}")
    print(out.text.strip() or f"[no text: {out.finish_reason}]")
    if out.error:
        print(f"  error: {out.error}")
    print(
        f"  [prompt {out.prompt_tokens} tokens, {out.cached_tokens} from the cache; "
        f"{len(out.token_ids)} new, {out.finish_reason}; {out.seconds:.2f} s]\n"
    )


# ---------------------------------------------------------------------- chat


def _chat(args: argparse.Namespace) -> int:
    from minirad.frontend import ChatSession

    _check_record(args.record, args.tp)
    if sys.stdin is None:
        raise ValueError("the standard input is closed, and a chat reads it")
    engine = _engine(args)
    params = dataclasses.replace(sampling_params(args), n=1)
    if isinstance(sys.stdin, io.TextIOWrapper):  # one line that is no text must not cost those behind it
        sys.stdin.reconfigure(errors="surrogateescape")
    lora = _one_adapter(engine)
    session = ChatSession(engine, args.system, lora=lora)
    print("Talk to the model. /new starts over (the cache stays), /quit or Ctrl-D ends.")
    with _recording(engine, args.record):
        _note(engine)
        while True:
            try:
                line = input("you> ").strip()
            except EOFError:
                print()
                return 0
            if line == "/quit":
                return 0
            if line == "/new":
                session = ChatSession(engine, args.system, lora=lora)
            elif line:
                _turn(engine, session, line, params)


def _one_adapter(engine: Engine) -> str:
    """The adapter that a chat is under, "" for none; ValueError where it might be one of several."""
    names = [*dict(engine.config.lora)]
    if len(names) > 1:
        raise ValueError(f"a chat is under one adapter, got {', '.join(names)}")
    return names[0] if names else ""


def _turn(engine: Engine, session: Any, line: str, params: Any) -> None:
    from minirad.observe import events as ev

    admitted: list[ev.RequestAdmitted] = []
    unsubscribe = engine.bus.subscribe(ev.RequestAdmitted, admitted.append)
    try:
        for token in session.stream(line, params):
            print(token.text, end="", flush=True)
    except ValueError as error:  # too long for the context, say: the chat goes on without that turn
        print(f"[not sent: {error}]")
        return
    finally:
        unsubscribe()
    if token.finish_reason in ("abort", "error"):
        print(f"\n[not answered: {token.error or token.finish_reason}]")
        return
    first = admitted[0]
    print(f"\n    [{first.cached} of {first.length} prompt tokens from the cache]")


# ---------------------------------------------------------------------- info


def _info(args: argparse.Namespace) -> int:
    import torch
    import transformers

    import minirad

    engine = _engine(args)
    _note(engine)
    shape = getattr(engine.model, "whole", engine.model.config)  # of which each of several ranks has a part
    facts: dict[str, Any] = {
        "minirad": minirad.__version__,
        "model": {
            "path": str(engine.model_path),
            "parameters": shape.num_parameters,
            **{
                name: getattr(shape, name)
                for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab_size")
            },
        },
        "config": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in dataclasses.asdict(engine.config).items()
        },
        "pool": {
            "tokens": engine.allocator.num_tokens,
            "pages": engine.allocator.num_pages,
            "bytes_per_token": engine.pool.bytes_per_token,
            "bytes": engine.pool.nbytes,
        },
        "attention": engine.attention.name,
        **_more_weights(engine),
        "machine": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "processor": platform.processor() or platform.machine(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }
    if args.json:
        print(json.dumps(facts, indent=1))
    else:
        for name, value in facts.items():
            if isinstance(value, dict):
                print(f"{name}:")
                for key, item in value.items():
                    print(f"  {key:16} {item}")
            else:
                print(f"{name}: {value}")
    return 0


def _more_weights(engine: Engine) -> dict[str, Any]:
    """Parameters of what computes beside the model: a draft head, adapters."""
    head = getattr(getattr(engine.runner, "drafter", None), "head", None)
    adapters: dict[str, Any] = getattr(engine.model, "adapters", {})
    facts: dict[str, Any] = {}
    if head is not None:
        facts["draft_head"] = {"parameters": head.num_parameters}
    if adapters:
        facts["adapters"] = {name: each.num_parameters for name, each in adapters.items()}
    return facts


if __name__ == "__main__":
    sys.exit(main())
