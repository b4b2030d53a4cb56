"""What several processes find together; and what they keep in memory while they do."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from evaluation_cases import script_file, tiny_network, tiny_run
from run_cases import in_processes
from torch import Tensor

from scalelong.evaluation import read_evaluations
from scalelong.evaluation.evaluate import features_of
from scalelong.runs import Run
from scalelong.runs.model import load_network
from scalelong.sampling.sample_run import Sampler, SampleRequest, conditions_of

pytest.importorskip("torchmetrics")

GUIDED = ("data.label_column=label", "labels.classes=10", "labels.drop=0.2", "sampling.guidance=2.0")


def test_two_processes_find_what_one_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script_file(tmp_path / "net.pt")
    tiny_run(tmp_path / "one", *GUIDED)
    shutil.copytree("one", "two")
    command = ["--images", 300, "--network", "torchscript:net.pt", "--weights", "both"]
    alone = run("evaluate", "one", *command)
    assert alone.exit_code == 0, alone.output
    # Statistics of their own are theirs to make.
    shutil.rmtree("statistics")
    in_processes({"out": "two", "processes": 2, "command": ["evaluate", "two", *map(str, command)]})
    printed = [Path(f"two-printed-{rank}").read_text(encoding="utf-8") for rank in range(2)]
    assert [text.count("FD-net") for text in (alone.stdout, *printed)] == [1, 1, 0], "only one process prints"
    assert [one.weights for one in read_evaluations(Path("one"))] == ["ema", "raw"]
    assert read_evaluations(Path("one")) == read_evaluations(Path("two"))


def test_conditions_are_asked_for_batch_by_batch_and_the_decoder_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Run(tiny_run(tmp_path / "run", *GUIDED))
    config, checkpoint, made, asked = trained.config(), trained.checkpoints().latest(), [], []
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
