"""Training in μP: the rates of both groups, exact resume, the base width, and what is exported."""

from __future__ import annotations

import signal
from pathlib import Path

import torch
from run_cases import SignalAt, assert_same_run, final_tensors, make_trainer, run_tiny, tiny
from safetensors.torch import load_file

from scalelong.models import UViT
from scalelong.models.mup import kinds_of
from scalelong.runs import Run
from scalelong.runs.card import UVIT_FILE
from scalelong.runs.export import export_run
from scalelong.runs.model import choose_checkpoint, read_network
from scalelong.training.state import learning_rate

MUP = ("model.parametrization=mup", "model.base_width=8")  # n = 2


def test_hidden_weights_follow_the_schedule_at_a_rate_over_n(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run", *MUP, "optim.schedule=cosine")
    optimizer, kinds = trainer.state.optimizer, kinds_of(trainer.network)
    names = {id(parameter): name for name, parameter in trainer.network.named_parameters()}
    for step in range(3):
        trainer.train_step()
        rate = learning_rate(trainer.config.optim, step, trainer.config.training.steps)
        for group in optimizer.param_groups:
            hidden = {kinds[names[id(parameter)]] == "hidden" for parameter in group["params"]}
            assert hidden == {group["lr"] == rate / 2}
            assert group["lr"] in (rate, rate / 2)


def test_a_run_that_was_stopped_ends_as_one_that_never_was(tmp_path: Path) -> None:
    run_tiny(tmp_path / "whole", *MUP)
    run_tiny(tmp_path / "stopped", *MUP, display=SignalAt(4, signal.SIGTERM))
    run_tiny(tmp_path / "stopped", *MUP)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_at_the_base_width_a_run_is_the_standard_one_to_the_bit(tmp_path: Path) -> None:
    run_tiny(tmp_path / "standard")
    run_tiny(tmp_path / "mup", "model.parametrization=mup", "model.base_width=16")
    ours, theirs = (final_tensors(tmp_path / name) for name in ("mup", "standard"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_public_code_computes_what_an_export_holds(tmp_path: Path) -> None:
    run_tiny(tmp_path / "run", *MUP, "scaling.method=none")
    run, config = Run(tmp_path / "run"), tiny(*MUP, "scaling.method=none")
    network = read_network(config, choose_checkpoint(run), "ema")
    export = export_run(tmp_path / "run", "uvit", tmp_path / "out")
    public = UViT(8, 4, in_chans=1, embed_dim=16, depth=2, num_heads=2)
    public.load_state_dict(load_file(export.folder / UVIT_FILE))
    inputs = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([3.0, 700.0])
    assert torch.equal(public.eval()(*inputs), network(*inputs))
