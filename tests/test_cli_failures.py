"""How commands end that fail: in one line, which says whose fault it is."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from command_line import assert_ends_with_error, run
from run_cases import run_tiny, tiny

from scalelong.cli import printable
from scalelong.cli.console import LONGEST_LINE, fail, print_line, print_now
from scalelong.cli.train import describe_end
from scalelong.config import load_recipe
from scalelong.data.decode import BrokenImages
from scalelong.training import TrainResult

ESCAPE = "\x1b[2J\x1b]0;title\x07\x9b31m"


def fail_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_it(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("scalelong.config.load_recipe", raise_it)


def test_what_is_no_mistake_of_the_user_is_called_a_defect_and_its_traceback_is_in_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fail_with(TypeError("an odd\nthing"), monkeypatch)
    result = run("train", "digits")
    assert result.exit_code == 1
    (file,) = tmp_path.iterdir()
    what = "TypeError: an odd. This is a defect of scalelong"
    assert result.stderr == f"error: {what}: please report it with {file}, where the traceback is\n"
    text = file.read_text()
    assert "TypeError: an odd\nthing" in text and "in raise_it" in text and text.startswith("scalelong ")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: 1 bytes\nmore"),
        RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"),
    ],
)
def test_too_little_memory_is_said_as_such(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(error, monkeypatch)
    assert_ends_with_error(run("train", "digits"), "there is not enough memory.*set a smaller batch.*")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), typer.Abort()])
def test_ctrl_c_while_a_command_begins_is_one_line(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(error, monkeypatch)
    result = run("train", "digits")
    assert (result.exit_code, result.stderr) == (
        130,
        "stopped: what is finished is kept, and the same command resumes\n",
    )


@pytest.mark.parametrize("seconds", [0.15, 0.6])
def test_ctrl_c_while_libraries_are_imported_is_one_line(seconds: float, tmp_path: Path) -> None:
    # It tells when Python is up and signals are handled, which on a busy machine may take long.
    code = "from scalelong import cli; cli.prepare_process = lambda: print(flush=True); cli.main()"
    command = [sys.executable, "-c", code, "train", "digits", "--out", str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert (process.returncode, said) == (130, "stopped: what is finished is kept, and the same command resumes\n")


def test_the_package_imports_no_library_before_it_can_be_stopped() -> None:
    code = "import sys, scalelong.cli; print({'torch', 'numpy', 'typer', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# What reaches the terminal


def test_controls_of_the_terminal_are_shown_and_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    print_now(ESCAPE)
    print_line(ESCAPE)
    with pytest.raises(SystemExit):
        fail(ESCAPE)
    said = capsys.readouterr()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", said.out + said.err)
    assert said.out.startswith(r"\x1b[2J\x1b]0;title\x07\x9b31m")
    assert printable("κ = 0.7,\tß\n") == "κ = 0.7,\tß\n"


def test_a_log_line_of_a_file_with_controls_in_its_name_is_shown_not_obeyed(tmp_path: Path) -> None:
    code = (
        "import logging, sys; from scalelong.cli import prepare_process; prepare_process(); "
        "from scalelong.data.decode import BrokenImages; BrokenImages('set', [(sys.argv[1], 'why')]).report(100)"
    )
    done = subprocess.run([sys.executable, "-c", code, ESCAPE], capture_output=True, text=True, check=True)
    assert r"\x1b[2J" in done.stderr and "\x1b" not in done.stderr
    assert ESCAPE in BrokenImages("set", [(ESCAPE, "why")]).describe(100)


def test_a_message_that_quotes_something_long_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fail("x" * 10**6)
    assert len(capsys.readouterr().err) < LONGEST_LINE + 20


@pytest.mark.parametrize("trained", [0, 3])
@pytest.mark.parametrize("signal_number", [None, 15])
def test_commands_to_copy_are_quoted(trained: int, signal_number: int | None) -> None:
    folder = Path("runs/my run; rm -rf $HOME")
    result = TrainResult(folder, 3 if signal_number is None else 2, 3, trained, signal_number)
    said = describe_end(result, load_recipe("digits"))
    assert "'runs/my run; rm -rf $HOME'" in said.rpartition("scalelong ")[2]


# What is left on the disk


def test_the_files_of_a_run_may_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        run_tiny(tmp_path / "run", "training.steps=1")
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != ".lock"]
    assert {path.suffix for path in files} >= {".safetensors", ".json", ".yaml", ".jsonl"}
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {"0o644"}
    assert tiny("training.steps=1")
