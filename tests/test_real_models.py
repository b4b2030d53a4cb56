"""The tool that tries public networks, on a stand-in checkout: it calls right what is right, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import try_real_models as tool  # noqa: E402
from real_models import trial  # noqa: E402
from real_models.load import Placeholders  # noqa: E402
from real_models.oracle import Join, scaled_at  # noqa: E402

NETWORK = '''
import torch
from a_package_that_nobody_has import decorator, Unused
from torch import nn


class Level(nn.Module):
    @decorator
    def __init__(self, width, below=None):
        super().__init__()
        self.encode = nn.Conv2d(width, width, 3, padding=1)
        self.below = below
        self.decode = nn.Conv2d(2 * width, width, 3, padding=1)

    def forward(self, x):
        skip = torch.tanh(self.encode(x))
        if self.below is None:
            return skip
        inner = self.below(skip[:, :, ::2, ::2]).repeat_interleave(2, 2).repeat_interleave(2, 3)
        return self.decode(torch.cat([inner, skip], dim=1))


class Net(nn.Module):
    """Three levels, each holding the next."""

    def __init__(self, width=4):
        super().__init__()
        self.top = Level(width, Level(width, Level(width)))
        self.last = nn.Conv2d(width, width, 1)
        nn.init.zeros_(self.last.weight)

    def forward(self, x, t):
        return {"out": self.last(self.top(x)) + t[:, None, None, None]}


class Plain(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(4, 4, 1), nn.SiLU(), nn.Conv2d(4, 4, 1))
'''


def entry(**changes: Any) -> dict[str, Any]:
    common = {"name": "a stand-in", "repository": "someone/standin", "commit": "1", "new": "standin_nets.net:Net"}
    inputs, joins = ["normal 2 4 8 8", "uniform 2"], ["Level.forward cat[1]"]
    return {**common, "inputs": inputs, "joins": joins, "skips": 2, **changes}


@pytest.fixture
def repos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of checkouts with one stand-in; what importing from it changes is undone."""
    package = tmp_path / "someone+standin" / "standin_nets"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "net.py").write_text(NETWORK)
    for name in ("path", "meta_path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.setattr(Placeholders, "names", [])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("standin_nets", "a_package_that_nobody_has"):
            del sys.modules[name]


def test_a_network_that_is_scaled_as_its_list_says_is_right(repos: Path) -> None:
    outcome = trial.attempt(entry(arguments={"width": 4}), repos)
    assert (outcome.verdict, outcome.reason) == ("right", "")
    assert (outcome.found, outcome.expected, outcome.how) == (2, 2, "traced")
    assert outcome.exact == {"uniform": True, "cs": True, "ls": True} and outcome.folds == "yes"


def test_scaling_something_else_is_wrong(repos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = trial.scale_skips
    monkeypatch.setattr(trial, "scale_skips", lambda net, method, **kw: real(net, "uniform", value=0.6, **without(kw)))
    outcome = trial.attempt(entry(), repos)
    assert outcome.verdict == "wrong" and outcome.reason.startswith("uniform: off by")


def test_scaling_the_joins_in_another_order_is_wrong(repos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = trial.scale_skips
    swapped = {"cs": "cs-reversed"}
    monkeypatch.setattr(trial, "scale_skips", lambda net, method, **kw: real(net, swapped.get(method, method), **kw))
    outcome = trial.attempt(entry(), repos)
    assert outcome.verdict == "wrong" and outcome.reason.startswith("cs: off by")


def test_finding_some_skips_only_is_partial(repos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = trial.find_skips
    monkeypatch.setattr(trial, "find_skips", lambda *given, **kw: real(*given, **kw)[:1])
    outcome = trial.attempt(entry(), repos)
    assert (outcome.verdict, outcome.reason) == ("partial", "1 skips found of 2")


def test_an_undo_that_leaves_a_trace_is_wrong(repos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "unscale_skips", lambda network: network)
    outcome = trial.attempt(entry(), repos)
    assert outcome.verdict == "wrong" and "undone, the network computes something else" in outcome.reason


def test_a_network_without_skips_is_refused_with_the_reason(repos: Path) -> None:
    described = {"new": "standin_nets.net:Plain", "inputs": ["normal 2 4 8 8"], "joins": [], "skips": 0}
    outcome = trial.attempt(entry(**described), repos)
    assert outcome.verdict == "refused" and "no long skip" in outcome.reason


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"skips": 3}, "ran 2 times, not 3"),
        ({"joins": ["Level.forward cat[0]", "Level.forward stack[1]"]}, "no such join"),
        ({"joins": ["Elsewhere.forward cat[1]"]}, "nothing that is called Elsewhere.forward"),
        ({"joins": ["the first one"]}, "a join reads like"),
        ({"new": "standin_nets.nowhere:Net"}, "No module named"),
    ],
)
def test_a_description_that_does_not_fit_is_broken_and_says_nothing_of_scaling(
    repos: Path, changes: dict[str, Any], reason: str
) -> None:
    outcome = trial.attempt(entry(**changes), repos)
    assert outcome.verdict == "broken" and reason in outcome.reason


class Joining(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        joined = torch.cat((x, y), 1) + 1
        if z is not None:
            joined = joined + z
        return self.mix(joined, other=y)

    def mix(self, first: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        first += other.repeat(1, 2)
        return first


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Joining.forward cat[0]", [10 * 1 + 1 + 3 + 2, 2 + 1 + 3 + 2]),
        ("Joining.forward cat[1]", [1 + 1 + 3 + 2, 10 * 2 + 1 + 3 + 2]),
        ("Joining.forward add#1[1]", [1 + 1 + 30 + 2, 2 + 1 + 30 + 2]),
        ("Joining.forward mix[other]", [1 + 1 + 3 + 20, 2 + 1 + 3 + 20]),
        ("Joining.mix add[1]", [1 + 1 + 3 + 20, 2 + 1 + 3 + 20]),
        ("Joining.forward value joined#0", [10 * (1 + 1) + 3 + 2, 10 * (2 + 1) + 3 + 2]),
    ],
)
def test_a_join_is_named_by_the_words_of_the_source(text: str, expected: list[float]) -> None:
    network, one = Joining(), torch.ones(1, 1)
    with scaled_at(network, [Join.read(text)], lambda _, skip: 10 * skip) as skips:
        assert network(one, 2 * one, 3 * torch.ones(1, 2)).tolist() == [expected]
    assert len(skips) == 1
    assert network(one, 2 * one).tolist() == [[1 + 1 + 2, 2 + 1 + 2]]


def test_a_network_that_is_not_here_in_the_version_of_the_list_is_not_had(tmp_path: Path) -> None:
    assert tool.cannot_be_had(entry(), None) == "no checkout"
    assert tool.cannot_be_had(entry(), tmp_path) == "no checkout"
    assert tool.cannot_be_had(entry(repository="pypi:nobody-has-this"), None) == "not installed"
    assert "is installed, not 0.0.1" in str(tool.cannot_be_had(entry(repository="pypi:torch", commit="0.0.1"), None))
    folder = tmp_path / "standin"
    folder.mkdir()
    subprocess.run(["git", "init", "-q", folder], check=True)
    assert tool.cannot_be_had(entry(), tmp_path) == "the checkout is at HEAD, not 1"
    assert tool.outcome_of(entry(), tmp_path)["verdict"] == "not had"


def test_the_table_goes_between_its_comments_and_counts_what_was_tried(tmp_path: Path) -> None:
    page = tmp_path / "models.md"
    page.write_text(f"before\n{tool.BEGIN}\nstale\n{tool.END}\nafter\n")
    common = {"repository": "a/b", "commit": "0123456789"}
    right = {"name": "U", "verdict": "right", "found": 2, "expected": 2, "how": "traced", "exact": {"cs": True}}
    missing = {"name": "V", "verdict": "not had", "reason": "no checkout"}
    tool.write_page(page, [common | right | {"heldout": "c0ffee", "first": "refused"}, common | missing])
    text = page.read_text()
    assert text.startswith(f"before\n{tool.BEGIN}\n") and text.endswith(f"{tool.END}\nafter\n") and "stale" not in text
    assert "1 tried: 1 right" in text
    assert "| U ¹ | a/b @ 0123456 | 2 of 2, traced | right, to the bit |  |" in text
    assert "The first results of these 1: 1 refused." in text


def test_the_list_reads_and_every_network_says_what_the_tool_needs() -> None:
    entries = tool.yaml.safe_load(tool.NETWORKS.read_text())
    needed = {"name", "repository", "commit", "new", "inputs", "joins", "skips"}
    assert all(needed <= set(one) for one in entries)
    assert len({one["name"] for one in entries}) == len(entries)
    assert all(bool(one["joins"]) == bool(one["skips"]) for one in entries)
    [Join.read(text) for one in entries for text in [*one["joins"], *one.get("or", [])]]


def without(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in ("value", "kappa")}
