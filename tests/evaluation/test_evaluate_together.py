"""What several processes, started by torchrun, find together; and what they keep in memory while they do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from evaluation_cases import script_file, tiny_network, tiny_run
from torch import Tensor

from scalelong.evaluation import Evaluation, read_evaluations
from scalelong.evaluation.evaluate import features_of
from scalelong.runs import Run
from scalelong.runs.model import load_network
from scalelong.sampling.sample_run import Sampler, SampleRequest, conditions_of

pytest.importorskip("torchmetrics")

GUIDED = ("data.label_column=label", "labels.classes=10", "labels.drop=0.2", "sampling.guidance=2.0")


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def evaluate(folder: Path, run: str, *launcher: str) -> list[Evaluation]:
    """What the command finds, in an empty folder for statistics of its own."""
    arguments = ["evaluate", run, "--images", "300", "--network", "net.pt", "--weights", "both"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *launcher, *arguments], cwd=folder, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("FD-net") == 1, "only one process prints"
    return read_evaluations(folder / run)


def test_two_ranks_of_torchrun_find_what_one_process_finds(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        folder = tmp_path / name
        tiny_run(folder / "run", *GUIDED)
        script_file(folder / "net.pt")
        launch = ("torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", "-m", "scalelong")
        found.append(evaluate(folder, "run", *(("scalelong",) if name == "one" else launch)))
    assert [one.weights for one in found[0]] == ["ema", "raw"]
    assert found[0] == found[1]


def test_conditions_are_asked_for_batch_by_batch_and_the_decoder_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tiny_run(tmp_path / "run", *GUIDED))
    config, checkpoint, made, asked = run.config(), run.checkpoints().latest(), [], []
    assert checkpoint is not None
    conditioning, conditions = conditions_of(config, SampleRequest())

    class Decoder:
        def __init__(self, *_: Any) -> None:
            made.append(self)

        def decode(self, latents: Tensor) -> Tensor:
            return latents

    monkeypatch.setattr(import_module("scalelong.sampling.sample_run"), "LatentEncoder", Decoder)
    # A block that only says that there are latents; the network draws as before.
    latent = config.model_copy(update={"latents": SimpleLatents()})
    sampler = Sampler(
        load_network(config, checkpoint, "ema"), latent, conditioning, lambda own: asked.append(own) or conditions(own)
    )
    for block in (range(0, 128), range(128, 140)):
        assert len(features_of(sampler, tiny_network(), block)) == len(block)
    assert asked == [range(0, 64), range(64, 128), range(128, 140)]
    assert len(made) == 1


class SimpleLatents:
    """Latents as large as the pixels of the digits."""

    factor, channels = 1, 1
