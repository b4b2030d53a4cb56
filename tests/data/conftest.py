"""What the tests of data share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest


@pytest.fixture(autouse=True)
def cache_in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library keeps a copy of what it loads; tests must not leave one behind."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))  # For the processes that a test starts.
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "images"))


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny encoders, and pictures to encode with them."""
    from prepare_cases import save_all

    return save_all(tmp_path_factory.mktemp("prepare"))


@pytest.fixture(scope="session")
def made(tiny_root: Path) -> Callable[[str], Any]:
    """Finished jobs by what they prepare, each done once; a test that changes the folder of one takes a copy."""
    from prepare_cases import tiny_job

    from scalelong.data.prepare import prepare

    jobs: dict[str, Any] = {}

    def make(what: str) -> Any:
        if what not in jobs:
            jobs[what] = tiny_job(tiny_root, tiny_root / f"prepared-{what}", what=what)
            prepare(jobs[what])
        return jobs[what]

    return make
