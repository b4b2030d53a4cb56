"""The monitor in the loops of Accelerate and Lightning, and in the loop of the docs."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from monitor_cases import loss_of, uvit

from scalelong.monitor.callbacks import AccelerateMonitor, LightningMonitor
from scalelong.monitor.diagnosis import Diagnosis
from scalelong.monitor.monitor import SkipMonitor

DOCS = Path(__file__).resolve().parents[2] / "docs" / "monitor.md"


def test_with_accelerate_only_updates_count_and_numbers_go_to_the_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = uvit()
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    logged: list[tuple[int, dict[str, float]]] = []
    monkeypatch.setattr(accelerator, "log", lambda numbers, step: logged.append((step, numbers)))
    with AccelerateMonitor(accelerator, prepared, every=2, probe_every=2) as monitor:
        for seed in range(8):
            with accelerator.accumulate(prepared):
                accelerator.backward(loss_of(prepared, seed))
                optimizer.step()
                optimizer.zero_grad()
                monitor.step()
    assert [step for step, _ in logged] == [2, 4]
    assert logged[-1][1] == monitor.latest
    assert {"skip1/feature", "block/mid_block/update", "robustness"} <= monitor.latest.keys()


class Callback:
    """Stands for `lightning.Callback`: every hook there is, doing nothing."""

    def setup(self, *args: Any) -> None: ...
    def on_train_start(self, *args: Any) -> None: ...
    def on_train_epoch_start(self, *args: Any) -> None: ...


class WatchSkips(LightningMonitor, Callback): ...


class Logger:
    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.lines.append((step, metrics))


def fit(callback: Any, model: torch.nn.Module, batches: range, start: int = 0) -> Logger:
    """What Lightning calls, with two batches for an update."""
    trainer = SimpleNamespace(global_step=start, loggers=[Logger()])
    holder, optimizer = torch.nn.ModuleDict({"network": model}), torch.optim.SGD(model.parameters(), lr=0.1)
    callback.setup(trainer, holder, "fit")
    callback.on_train_start(trainer, holder)
    callback.on_train_epoch_start(trainer, holder)
    for number in batches:
        loss_of(model, number).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
            trainer.global_step += 1
        callback.on_train_batch_end(trainer, holder, None, None, number)
    callback.on_train_end(trainer, holder)
    return trainer.loggers[0]


def test_with_lightning_numbers_of_updates_go_to_the_loggers_and_a_resumed_run_goes_on() -> None:
    whole, model = WatchSkips(every=1, probe_every=None, window=8), uvit()
    logger = fit(whole, model, range(20))
    assert [step for step, _ in logger.lines] == list(range(1, 11))
    model_again = uvit()
    torch.manual_seed(0)
    first, second = WatchSkips(every=1, probe_every=None, window=8), WatchSkips(every=1, probe_every=None, window=8)
    model_again.load_state_dict(uvit().state_dict())
    early = fit(first, model_again, range(12))
    second.load_state_dict(first.state_dict())
    late = fit(second, model_again, range(12, 20), start=6)
    assert [step for step, _ in early.lines + late.lines] == list(range(1, 11))
    # With its window saved, the index is there from the first reading on.
    assert "skip1/feature_oscillation" in late.lines[0][1]


def test_the_diagnosis_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    found = Diagnosis(2, "mid_block", 0.4, "mid_block", 0.4, skip=1, consumer="out_blocks.1", skip_swing=0.3)
    monkeypatch.setattr(SkipMonitor, "diagnosis", lambda self: found)
    with caplog.at_level(logging.WARNING):
        fit(WatchSkips(every=1, probe_every=None), uvit(), range(8))
    assert [record.getMessage() for record in caplog.records] == [str(found)]


def test_the_loop_of_the_docs_runs_as_it_is_written(capsys: pytest.CaptureFixture[str], tmp_path, monkeypatch) -> None:
    pytest.importorskip("diffusers")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(import torch.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    exec(compile(code, str(DOCS), "exec"), {})
    lines = Path("readings.jsonl").read_text().splitlines()
    assert len(lines) == 4
    assert "skip1/feature" in capsys.readouterr().out
