"""The commands `scalelong stats` and `scalelong evaluate`: what they print and write, and how they fail."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command_line import assert_fails, run
from evaluation_cases import TINY, script_file, tiny_run

from scalelong.cli import console

pytest.importorskip("torchmetrics")
np = pytest.importorskip("numpy")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and a feature network in it."""
    folder = tmp_path_factory.mktemp("evaluated")
    script_file(folder / "net.pt")
    tiny_run(folder / "run")
    (folder / "empty.json").write_text("[]")
    np.save(folder / "net.features.npy", np.zeros((3, 2)))
    return folder


@pytest.fixture(autouse=True)
def place(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)


def test_statistics_are_made_once_and_named(made: Path) -> None:
    command = (
        "stats",
        "digits",
        "--network",
        "torchscript:net.pt",
        "--set",
        "data.validation_count=1500",
        "--out",
        "cache",
    )
    first = run(*command)
    assert first.exit_code == 0, first.output
    (last,) = first.stdout.splitlines()
    assert re.fullmatch(r"297 images, 8 features of torchscript:net.pt: cache/sklearn-digits-net-[0-9a-f]{8}.npz", last)
    assert run(*command).stdout.splitlines() == [last]


def test_statistics_of_a_source_are_those_of_all_its_images(made: Path) -> None:
    result = run("stats", "sklearn:digits", "--size", 8, "--network", "torchscript:net.pt", "--out", "all")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("1797 images, 8 features of torchscript:net.pt: all/sklearn-digits-net-")


def test_how_far_a_command_is_stands_on_stderr(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", 0.0)
    result = run("stats", "digits", "--network", "torchscript:net.pt", "--images", 40, "--out", "shown")
    lines = result.stderr.splitlines()
    assert lines[0] == "0 of 40 images of the dataset read" and lines[-1] == "40 of 40 images of the dataset described"
    assert result.stdout.startswith("40 images, 8 features") and result.stdout.count("\n") == 1


def test_a_training_that_waits_for_statistics_says_so(
    made: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", 0.0)
    network = made / "net.pt"
    monkeypatch.chdir(tmp_path)
    evaluated = ("evaluation.every=3", "evaluation.images=20", f"evaluation.network=torchscript:{network}")
    result = run("train", "digits", *(f"--set={override}" for override in (*TINY, *evaluated)))
    assert result.exit_code == 0, result.output
    assert "297 of 297 images of the dataset described" in result.stderr.splitlines()
    assert "FD-net" in result.stdout and "dataset" not in result.stdout


def test_an_evaluation_prints_a_table_and_writes_its_file(made: Path) -> None:
    result = run("evaluate", "run", "--images", 40, "--weights", "both", "--network", "torchscript:net.pt")
    assert result.exit_code == 0, result.output
    header, _, ema, raw, facts = result.stdout.splitlines()[-5:]
    assert header.split() == ["step", "weights", "FD-net", "KID-net", "precision", "recall"]
    assert ema.split()[:2] == ["3", "ema"] and raw.split()[:2] == ["3", "raw"]
    assert facts.startswith("40 images, ddim, 2 steps, against 297 images; network net.pt (")
    found = json.loads((made / "run" / "evaluation.json").read_bytes())
    assert [one["weights"] for one in found] == ["ema", "raw"]
    assert f"{found[0]['figures']['FD-net']['value']:.4g} (" in ema


def test_an_evaluation_is_compared_with_an_earlier_one_only_where_that_is_fair(made: Path) -> None:
    assert run("evaluate", "run", "--images", 40, "--network", "torchscript:net.pt").exit_code == 0
    same = run(
        "evaluate", "run", "--images", 40, "--network", "torchscript:net.pt", "--compare", "run", "--weights", "both"
    )
    assert "ema compared with step 3, ema: FD-net +0, KID-net +0, precision +0, recall +0" in same.stdout
    assert re.search("raw compared with step 3, (ema|raw): FD-net ", same.stdout)
    other = run("evaluate", "run", "--images", 50, "--network", "torchscript:net.pt", "--compare", "run")
    assert other.exit_code == 2
    assert other.stderr == "error: these figures cannot be compared: the number of images is 40 and 50\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("evaluate", "nowhere"), "nowhere is not the folder of a run"),
        (("evaluate", "run", "--network", "./none.pt"), "there is no file './none.pt'; a feature network is inception"),
        (
            ("evaluate", "run", "--network", "torchscript:net.pt", "--weights", "best"),
            "'best' is not one of 'ema', 'raw', 'both'",
        ),
        (
            ("evaluate", "run", "--network", "torchscript:net.pt", "--reference", "none.npz"),
            "there are no statistics 'none.npz'",
        ),
        (
            ("evaluate", "run", "--network", "torchscript:net.pt", "--guidance", "3"),
            "other than 1 needs labels.drop or text.drop",
        ),
        (
            ("evaluate", "run", "--network", "torchscript:net.pt", "--compare", "empty.json"),
            "empty.json holds no evaluations to",
        ),
        (("evaluate", "run", "--network", "torchscript:net.pt", "--checkpoint", "best"), "use --checkpoint last"),
        (("evaluate", "run", "--network", "torchscript:net.pt", "--seed", str(2**64)), "--seed"),
        (
            ("evaluate", "run", "--network", "torchscript:net.pt", "--reference", "net.features.npy"),
            "it holds one array",
        ),
        (
            ("evaluate", "run", "--resize", "tf1"),
            "--resize is for --network inception: eff",
        ),
        (("evaluate", "run", "--resize", "nearest"), "'nearest' is not one of 'pytorch-fid', 'tf1', 'clean'"),
        (("stats", "digitz", "--network", "torchscript:net.pt"), "did you mean 'digits'?"),
        (("stats", "x.zip", "--size", "8", "--set", "seed=1"), "--set changes a recipe"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    assert_fails(run(*arguments), re.escape(message))
