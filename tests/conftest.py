"""What every test relies on: no network, one thread, no wait for the disk, a fixed seed, and where shared data is."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Read by huggingface_hub when it is first imported, so it must be set before any test module is.
os.environ["HF_HUB_OFFLINE"] = "1"

import hypothesis
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent

torch.set_num_threads(1)

# A deadline measures how busy the machine is, and a random search would make a failure hard to repeat.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("repeatable")

# What is imported while tests are collected stays: looking for garbage in it takes a quarter of that time.
gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()


modules_at_last_freeze = 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the modules that share runs of other processes: a worker without work takes from the end of another's,

    and would do their runs once more.
    """
    items.sort(key=lambda item: not hasattr(getattr(item, "module", None), "in_processes"))


def pytest_runtest_setup() -> None:
    """Let the collector, and `gc.get_referrers` in `scale_skips`, look at a test's own objects only.

    With every library loaded either goes through millions of objects, which takes longer than most tests.
    """
    global modules_at_last_freeze
    if len(sys.modules) > modules_at_last_freeze + 50:
        gc.collect()
        gc.freeze()
        modules_at_last_freeze = len(sys.modules)


@pytest.fixture(autouse=True, scope="session")
def unsynced() -> Iterator[None]:
    """Waiting for the disk is most of a small run's time, and no test cuts the power; killed saves do wait for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same random numbers for a test, whether it runs alone or after others."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of small real datasets beside the repository; tests that need it are skipped where it is missing."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the datasets of ../shared/data are not here")
    return folder
