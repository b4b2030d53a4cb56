"""Commands as tests call them, and how they fail."""

from __future__ import annotations

import re
from typing import Any

from typer.testing import CliRunner

from scalelong.cli.app import app

# What a launcher, a CI service or a user may have set to change processes, width or colours of all programs.
LAUNCHER = ("RANK", "WORLD_SIZE")
TERMINAL = ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "PY_COLORS", "TTY_COMPATIBLE", "GITHUB_ACTIONS")


def run(*arguments: Any, **env: str) -> Any:
    """Run a command of `scalelong` in this process, with nothing in its environment but what the test gives."""
    environment = dict.fromkeys((*LAUNCHER, *TERMINAL)) | env
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="scalelong", env=environment)


def sets(*overrides: str) -> list[str]:
    """`--set` before each override."""
    return [part for override in overrides for part in ("--set", override)]


def assert_fails(result: Any, message: str) -> None:
    """One line on stderr, nothing on stdout, exit code 2."""
    assert_ends_with_error(result, f".*{message}.*")
    assert result.stdout == ""


def assert_ends_with_error(result: Any, message: str) -> None:
    """One line on stderr, all of it as given, and exit code 2."""
    assert result.exit_code == 2, result.output
    assert re.fullmatch(f"error: {message}\n", result.stderr), result.stderr
