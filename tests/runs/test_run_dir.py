"""What a run's folder says of the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from scalelong.runs.run_dir import Run, environment, last_precision
from scalelong.utils.records import flatten


@pytest.mark.parametrize(("written", "precision"), [(["bf16", "fp32"], "fp32"), (["no"], "fp32"), ([], None)])
def test_the_last_precision_is_that_of_the_last_start_and_older_runs_call_fp32_no(
    tmp_path: Path, written: list[str], precision: str | None
) -> None:
    run = Run(tmp_path)
    if written:
        run.environment_file.write_text(json.dumps([{"precision": name} for name in written]))
    assert len(run.starts()) == len(written)
    assert last_precision(run) == precision


def test_an_environment_says_what_a_run_runs_with() -> None:
    found = environment(device=torch.device("cpu"), processes=2, precision="bf16", seed=3, step=40)
    expected = {"device": "cpu", "processes": 2, "precision": "bf16", "seed": 3, "step": 40}
    assert expected.items() <= found.items()
    assert {"python", "torch"} <= found["versions"].keys()


def test_only_mappings_are_flattened() -> None:
    assert flatten({"a": {"b": {"c": 1}, "d": [{"e": 2}]}}) == {"a.b.c": 1, "a.d": [{"e": 2}]}
