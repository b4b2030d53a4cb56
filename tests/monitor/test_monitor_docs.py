"""The loops of the docs run as they are written: plain torch, Accelerate, and a stand-in for Lightning."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from monitor_cases import loss_of, uvit

from scalelong.monitor import SkipMonitor

DOCS = Path(__file__).resolve().parents[2] / "docs" / "monitor.md"
Lines = list[tuple[int, dict[str, float]]]


def run_docs(beginning: str, **names: Any) -> dict[str, Any]:
    """Run the example of the page that begins so; what it defined."""
    (code,) = re.findall(rf"```python\n({beginning}.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    exec(compile(code, str(DOCS), "exec"), names)
    return names


def test_the_loop_of_plain_torch(capsys: pytest.CaptureFixture[str], tmp_path, monkeypatch) -> None:
    pytest.importorskip("diffusers")
    monkeypatch.chdir(tmp_path)
    run_docs("import torch")
    lines = Path("readings.jsonl").read_text().splitlines()
    assert len(lines) == 4
    assert "skip1/feature" in capsys.readouterr().out


def test_with_accelerate_only_updates_count_and_numbers_go_to_the_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    lines: Lines = []
    monkeypatch.setattr(accelerator, "log", lambda numbers, step: lines.append((step, numbers)))
    model = uvit()
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    names = {"accelerator": accelerator, "model": prepared, "optimizer": optimizer, "loss_of": loss_of}
    monitor = run_docs("with SkipMonitor", SkipMonitor=SkipMonitor, batches=range(42), **names)["monitor"]
    assert [step for step, _ in lines] == [10, 20] and monitor.count == 21
    assert lines[-1][1] == monitor.latest
    assert {"skip1/feature", "block/mid_block/update"} <= monitor.latest.keys()


def fit(callback: Any, model: torch.nn.Module, batches: range, start: int = 0) -> Lines:
    """What Lightning calls, with two batches for an update."""
    lines: Lines = []
    logger = SimpleNamespace(log_metrics=lambda numbers, step: lines.append((step, numbers)))
    holder, optimizer = torch.nn.ModuleDict({"network": model}), torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = SimpleNamespace(global_step=start, logger=logger, model=holder)
    callback.on_train_start(trainer, holder)
    for number in batches:
        loss_of(model, number).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
            trainer.global_step += 1
        callback.on_train_batch_end(trainer, holder, None, None, number)
    callback.on_train_end(trainer, holder)
    assert not callback.monitor.running
    return lines


def test_with_lightning_numbers_of_updates_go_to_the_logger_and_a_resumed_run_counts_on(monkeypatch) -> None:
    lightning = ModuleType("lightning")
    lightning.Callback = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lightning", lightning)
    callback = run_docs("import lightning", SkipMonitor=SkipMonitor)["MonitorSkips"]
    model = uvit()
    assert [step for step, _ in fit(callback(), model, range(26))] == [10]
    late = fit(callback(), model, range(26, 42), start=13)
    assert [step for step, _ in late] == [20] and "skip1/feature" in late[0][1]


def test_the_page_says_of_the_states_what_the_runs_say() -> None:
    runs = json.loads((DOCS.parent / "results" / "states.json").read_text(encoding="utf-8"))
    held_out = [run for run in runs if run["seed"]]
    low, failed = [r for r in held_out if not r["above"]], [r for r in held_out if r["failed"]]
    high = [r for r in held_out if r["above"] and not r["failed"]]
    said = [f"{sum(r['word'] is not None for r in some)} of {len(some)}" for some in (low, failed, high)]
    text = DOCS.read_text(encoding="utf-8")
    assert "| **a block grows 500 times** | **{}** | **{}** | {} |".format(*said) in text
    assert f"({len(held_out)} runs)" in text
