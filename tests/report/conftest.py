"""The folders that most tests of the page read, and none writes to."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_cases import write_comparison, write_run


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cases")
    write_comparison(folder / "comparison")
    write_comparison(folder / "rates", rates=(0.002, 0.004, 0.008), seeds=1)
    write_comparison(folder / "running", done=False, seeds=2)
    write_run(folder / "single", method="ls", watched=True)
    write_run(folder / "half", until=1200)
    write_run(folder / "lost", until=800, diverges=True)
    return folder
