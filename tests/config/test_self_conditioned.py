"""`model.self_conditioning: true`: the network of a recipe, its weights, runs and samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from own_cases import model as own_model
from run_cases import UNET, assert_same_run, run_tiny, tiny
from safetensors.torch import save_file

from scalelong.config import Config, build_model, load_recipe, summarise
from scalelong.config.build import count_parameters
from scalelong.runs import Run
from scalelong.runs.model import choose_checkpoint, read_network
from scalelong.sampling import sample_run

pytestmark = pytest.mark.filterwarnings("ignore::scalelong.AbsorbedScalingWarning")

ON = "model.self_conditioning=true"


def recipe(kind: str, *overrides: str) -> Config:
    return load_recipe("cifar10-tiny-unet", [*UNET, *overrides]) if kind == "unet" else tiny(*overrides)


@pytest.mark.parametrize("method", ["none", "ls"])
@pytest.mark.parametrize("kind", ["uvit", "unet"])
def test_recipes_that_differ_in_it_only_start_from_the_same_function(kind: str, method: str) -> None:
    plain, guided = (recipe(kind, f"scaling.method={method}", "scaling.kappa=null", *more) for more in ((), (ON,)))
    one, other = build_model(plain).eval(), build_model(guided).eval()
    state = other.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in one.state_dict().items())
    x, t = torch.randn(2, 1, 8, 8), torch.tensor([3, 7])
    found = [result if isinstance(result, torch.Tensor) else result.sample for result in (one(x, t), other(x, t))]
    assert torch.equal(*found)
    assert summarise(guided).parameters == count_parameters(other) > summarise(plain).parameters


def test_a_guided_run_starts_from_a_plain_network_or_from_a_guided_one(tmp_path: Path) -> None:
    for name, options in {"plain": (), "guided": (ON,)}.items():
        source = build_model(tiny("seed=5", *options))
        save_file(source.state_dict(), tmp_path / f"{name}.safetensors")
        started = build_model(tiny(ON, f"model.weights={tmp_path}/{name}.safetensors")).state_dict()
        assert all(started[key].equal(value) for key, value in source.state_dict().items())
        assert "self_conditioning.last.weight" in started
    with pytest.raises(ValueError, match="of another network: self_conditioning"):
        build_model(tiny(f"model.weights={tmp_path}/guided.safetensors"))


def test_a_guided_run_resumes_exactly_and_is_sampled_as_it_was_trained(tmp_path: Path) -> None:
    run_tiny(tmp_path / "whole", ON)
    run_tiny(tmp_path / "parts", ON, "training.steps=5", "optim.schedule=constant")
    run_tiny(tmp_path / "parts", ON)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    run = Run(tmp_path / "whole")
    network = read_network(run.config(), choose_checkpoint(run), "raw")
    assert network.get_parameter("self_conditioning.last.weight").abs().sum() > 0
    assert (sample_run(tmp_path / "whole", 1) / "grid.png").is_file()


def test_a_network_without_a_bottleneck_is_refused_in_one_line() -> None:
    config = load_recipe(
        "digits", [own_model(more=", self_conditioning: true"), "scaling.method=none", "scaling.kappa=null"]
    )
    with pytest.raises(ValueError, match=r"has no bottleneck that is known: self-conditioning is for U-ViTs"):
        build_model(config)
