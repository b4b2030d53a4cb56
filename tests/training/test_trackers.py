"""TensorBoard and W&B: they hold the numbers of metrics.jsonl, each once, and write nowhere but in the run's folder."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from run_cases import Crash, CrashAt, make_trainer, run_tiny
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from scalelong.guard.losses import SpikeDetector
from scalelong.runs import RunError, read_metrics

TENSORBOARD = ("training.trackers=[tensorboard]", "training.validate_every=4")
WANDB = ("training.trackers=[wandb]", "training.validate_every=4")

Series = dict[str, list[tuple[int, float]]]


def scalars(out: Path) -> Series:
    """The series of all event files of a run by name: step and value."""
    events = EventAccumulator(str(out / "scalelong"), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def single(value: Any) -> float:
    """A number as an event file holds it."""
    return torch.tensor(float(value), dtype=torch.float32).item()


def series_of_metrics(out: Path) -> Series:
    series: Series = defaultdict(list)
    for line in read_metrics(out / "metrics.jsonl"):
        for key, value in line.items():
            if key != "step":
                series[key].append((line["step"], single(value)))
    return series


def test_tensorboard_has_the_numbers_and_steps_of_the_log(tmp_path: Path) -> None:
    run_tiny(tmp_path, *TENSORBOARD)
    found = scalars(tmp_path)
    assert found == series_of_metrics(tmp_path)
    assert [step for step, _ in found["loss"]] == list(range(1, 9))
    assert [step for step, _ in found["validation_loss_ema"]] == [4, 8]


def test_tensorboard_has_every_step_of_an_interrupted_run_once(tmp_path: Path) -> None:
    for step in (5, 8):
        with pytest.raises(Crash):
            run_tiny(tmp_path, *TENSORBOARD, display=CrashAt(step))
    run_tiny(tmp_path, *TENSORBOARD)
    assert len(list((tmp_path / "scalelong").glob("events*"))) == 3
    assert scalars(tmp_path) == series_of_metrics(tmp_path)


def test_tensorboard_has_the_settings_of_the_run(tmp_path: Path) -> None:
    run_tiny(tmp_path, *TENSORBOARD, "training.steps=1")
    (events,) = (tmp_path / "scalelong").glob("*/events*")
    (metadata,) = [
        content
        for tag, content in EventAccumulator(str(events.parent)).Reload().PluginTagToContent("hparams").items()
        if tag.endswith("session_start_info")
    ]
    settings = HParamsPluginData.FromString(metadata).session_start_info.hparams
    assert settings["scaling.kappa"].number_value == 0.7
    assert settings["model.kind"].string_value == "uvit"
    assert settings["training.compile"].bool_value is False


def test_unusual_steps_are_series_of_their_own(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, *TENSORBOARD, "training.log_every=8")
    noise = trainer.loss.sample_noise

    def spoil(batch: Any) -> Any:
        noised = noise(batch)
        return replace(noised, images=noised.images * {5: 100.0, 6: math.nan}.get(batch.step, 1.0))

    object.__setattr__(trainer.loss, "sample_noise", spoil)
    trainer.state.spikes = SpikeDetector(window=4)
    trainer.train()
    found = scalars(tmp_path)
    assert [step for step, _ in found["loss"]] == [8]
    assert [step for step, _ in found["spike/loss"]] == [6]
    ((step, loss),) = found["skipped/loss"]
    assert step == 7
    assert math.isnan(loss)


class FakeWandb(ModuleType):
    """Stands in for the library: keeps what it is told."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None)
        self.starts: list[dict[str, Any]] = []
        self.lines: list[dict[str, Any]] = []
        self.settings: dict[str, Any] = {}
        self.config, self.finished = self, 0

    def init(self, **options: Any) -> FakeWandb:
        self.starts.append(options)
        return self

    def update(self, values: dict[str, Any], **options: Any) -> None:
        self.settings |= values

    def log(self, values: dict[str, Any], step: int) -> None:
        self.lines.append({"step": step, **values})

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_is_told_every_line_of_the_log_and_the_settings(tmp_path: Path, wandb: FakeWandb) -> None:
    run_tiny(tmp_path / "mine", *WANDB)
    assert wandb.lines == read_metrics(tmp_path / "mine" / "metrics.jsonl")
    assert wandb.settings["scaling.kappa"] == 0.7
    assert wandb.settings["optim.betas"] == "[0.9, 0.99]"
    assert (wandb.starts[0]["project"], wandb.starts[0]["name"]) == ("scalelong", "mine")
    assert wandb.starts[0]["dir"] == str(tmp_path / "mine")
    assert wandb.finished == 1


def test_wandb_goes_on_with_the_run_that_was_interrupted_and_with_no_other(tmp_path: Path, wandb: FakeWandb) -> None:
    with pytest.raises(Crash):
        run_tiny(tmp_path / "one", *WANDB, display=CrashAt(5))
    run_tiny(tmp_path / "one", *WANDB)
    run_tiny(tmp_path / "other", *WANDB)
    first, again, other = (start["id"] for start in wandb.starts)
    assert again == first != other
    assert {start["resume"] for start in wandb.starts} == {"allow"}


def test_a_tracker_that_does_not_start_fails_in_one_line_and_the_run_can_go_on_without(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**options: Any) -> None:
        raise RuntimeError("no API key configured")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(RunError, match="training.trackers: could not start wandb: no API key configured"):
        run_tiny(tmp_path, *WANDB)
    assert run_tiny(tmp_path).finished
