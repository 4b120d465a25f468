"""Shared by all tests: a tiny random Llama, engines that check themselves, and one torch thread."""

from __future__ import annotations

import gc
import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():  # where there is Triton but no GPU, its interpreter runs the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

from support import TINY, CheckedEngine, tiny_config

from minirad.config import EngineConfig
from minirad.model.llama import LlamaModel, random_weights

__all__ = ["TINY", "CheckedEngine", "tiny_config"]  # for those who import them from here

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts what runs in the background like this
    signal.signal(signal.SIGINT, signal.default_int_handler)  # and some tests press Ctrl-C
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # and nohup like this
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

settings.load_profile(
    "ci"
)  # the same examples everywhere and every time, which no clock and no database changes
torch.set_num_threads(1)  # two threads beside another busy process are slower than one


def pytest_collection_finish() -> None:
    """Thousands of tests and all of torch stay to the end: the collector need not walk through them."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With -n auto neighbours stay on one worker, which makes what a file shares only once.

    Not in pyproject.toml: who grades a lesson has pytest, and no xdist.
    """
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def no_learners_progress(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the tests solve and predict is nobody's progress."""
    os.environ["MINIRAD_PROGRESS"] = str(tmp_path_factory.mktemp("learner") / "progress.json")


@pytest.fixture(scope="session")
def tiny_model() -> LlamaModel:
    config = tiny_config()
    return LlamaModel(config, random_weights(config, 0, dtype=torch.float32, device="cpu"))


@pytest.fixture
def make_engine(tiny_model: LlamaModel):
    def make(cache=None, **config: object) -> CheckedEngine:
        config = {"kv_tokens": 64, "max_running": 4, "poison_freed": True, **config}
        return CheckedEngine(EngineConfig(**config), cache, model=tiny_model)

    return make
