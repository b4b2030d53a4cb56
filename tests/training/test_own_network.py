"""Laws of runs with a network of one's own: they train, resume to the bit, and bring their code only where allowed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import assert_fails, run, sets
from own_cases import HOME_MADE, NET, NETWORKS, model
from run_cases import Crash, CrashAt, assert_same_run, in_processes, run_tiny
from safetensors.torch import load_file
from torch import Tensor

from scalelong import from_pretrained
from scalelong.runs import Run, RunError
from scalelong.runs.export import export_run
from scalelong.runs.model import load_network
from scalelong.sampling import sample_run

pytestmark = pytest.mark.filterwarnings("ignore::scalelong.AbsorbedScalingWarning")


def copy_of_net(folder: Path) -> str:
    """The home-made network in a file that a test may change, as a recipe names it."""
    shutil.copyfile(NET, folder / "net.py")
    return HOME_MADE.replace(str(NET), str(folder / "net.py"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the home-made network, with a reading of the monitor."""
    out = tmp_path_factory.mktemp("own") / "run"
    run_tiny(out, model(), "training.monitor_every=4")
    return out


def test_a_run_of_ones_own_network_is_resumed_to_the_bit(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(Crash):
        run_tiny(tmp_path / "run", model(), "training.monitor_every=4", display=CrashAt(5))
    assert run_tiny(tmp_path / "run", model(), "training.monitor_every=4").trained == 5
    assert_same_run(tmp_path / "run", finished)


def test_a_run_keeps_the_skips_and_the_code_that_it_began_with(finished: Path, monkeypatch: Any) -> None:
    kept = Run(finished).config(allow_code=True).model
    assert [site.consumer for site in kept.sites or ()] == ["ups.1", "ups.0"]
    assert (finished / "code" / "net.py").read_bytes() == NET.read_bytes()
    # The same recipe, which says nothing of skips, resumes it: they are not looked for again.
    monkeypatch.setattr("scalelong.config.own.find_skips", lambda *_: pytest.fail("traced again"))
    assert run_tiny(finished, model(), "training.monitor_every=4").trained == 0


def test_changed_code_is_refused_until_it_is_put_back(tmp_path: Path) -> None:
    out, factory = tmp_path / "run", copy_of_net(tmp_path)
    run_tiny(out, model(factory), "training.steps=2")
    with (tmp_path / "net.py").open("a") as file:
        file.write("# changed\n")
    for action in (
        lambda: run_tiny(out, model(factory), "training.steps=4"),
        lambda: sample_run(out, 2, allow_code=True),
        lambda: export_run(out, "safetensors", tmp_path / "export", allow_code=True),
    ):
        with pytest.raises(ValueError, match=r"net\.py:build is not the code that this run began with .*: put it back"):
            action()
    shutil.copyfile(out / "code" / "net.py", tmp_path / "net.py")
    assert run_tiny(out, model(factory), "training.steps=4").trained == 2


def test_a_run_that_was_moved_finds_its_code_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    run_tiny(tmp_path / "here" / "run", model(copy_of_net(tmp_path / "here")), "training.steps=2")
    (tmp_path / "here").rename(tmp_path / "there")
    out = tmp_path / "there" / "run"
    moved = HOME_MADE.replace(str(NET), str(tmp_path / "there" / "net.py"))
    assert run_tiny(out, model(moved), "training.steps=4").trained == 2
    (tmp_path / "there" / "net.py").unlink()
    assert sample_run(out, 2, allow_code=True).is_dir()
    assert Run(out).config(allow_code=True).model.factory == f"{out / 'code' / 'net.py'}:build"


def test_a_run_brings_its_code_only_where_that_is_allowed(finished: Path, tmp_path: Path) -> None:
    refused = "has a network of its own, and would run the code .*net.py:build: look at it, then give --allow-code"
    with pytest.raises(RunError, match=refused):
        Run(finished).config()
    for command in (
        ["sample", finished, "-n", 2],
        ["train", "--out", finished, *sets("training.steps=9")],
        ["evaluate", finished, "--images", 20],
        ["export", finished, "--to", "safetensors", "--out", tmp_path / "export"],
    ):
        assert_fails(run(*command), refused)
    done = run("sample", finished, "-n", 2, "--allow-code")
    assert done.exit_code == 0, done.output
    assert "2 images and grid.png" in done.stdout


def test_the_end_of_a_run_names_the_next_command_with_what_it_needs(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(NET.with_name("digits.yaml").read_text().replace("net.py:build", f"{NET}:build"))
    small = sets("training.steps=1", "model.options.depth=2", "training.validate_every=null", "sampling.steps=2")
    done = run("train", recipe, *small, *sets("training.sample_every=null"), "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert done.stdout.endswith(f"For more samples: scalelong sample {tmp_path / 'run'} --allow-code\n")


@pytest.mark.parametrize("method", ["cs", "ls"])
def test_an_export_is_the_weights_the_code_and_the_lines_that_load_them(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    run_tiny(out, model(), f"scaling.method={method}", "training.steps=2")
    done = export_run(out, "safetensors", tmp_path / "export", allow_code=True)
    assert done.fused == (method == "cs")
    text = (done.folder / "README.md").read_text()
    assert str(NET.parent) not in text
    assert '"factory": "net.py:build"' in text
    code = text.partition("```python\n")[2].partition("```")[0]
    monkeypatch.syspath_prepend(done.folder)
    names: dict[str, Any] = {}
    exec(code.replace("FOLDER", str(done.folder)), names)  # The card's own lines are what is tested.
    checkpoint = Run(out).checkpoints().latest()
    assert checkpoint is not None
    expected = load_network(Run(out).config(allow_code=True), checkpoint, "ema")
    x, t = torch.randn(2, 1, 8, 8), torch.tensor([3, 900])
    with torch.no_grad():
        torch.testing.assert_close(names["nnet"](x, t), expected(x, t), rtol=1e-4, atol=1e-5)
    if not done.fused:
        with pytest.raises(RuntimeError, match="skip_scaling"):
            names["build"](width=8, depth=2).load_state_dict(load_file(done.folder / "model.safetensors"))


def test_an_export_for_another_library_is_refused(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the network of this run is a python: use --to safetensors"):
        export_run(finished, "uvit", tmp_path / "export", allow_code=True)


def test_a_network_may_give_an_object_with_a_sample(tmp_path: Path) -> None:
    factory = "diffusers:UNet2DModel, options: {sample_size: 8, in_channels: 1, out_channels: 1, "
    factory += "block_out_channels: [8, 16], layers_per_block: 1, norm_num_groups: 4, add_attention: false, "
    factory += "down_block_types: [DownBlock2D, DownBlock2D], up_block_types: [UpBlock2D, UpBlock2D]}"
    run_tiny(tmp_path / "run", model(factory), "training.steps=2")
    done = export_run(tmp_path / "run", "safetensors", tmp_path / "export", allow_code=True)
    from diffusers import UNet2DModel

    assert isinstance(from_pretrained(UNet2DModel, done.folder), UNet2DModel)


def images_of(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob("*.png"))]


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_each_network_is_trained_killed_and_resumed_to_the_bit_and_sampled(name: str, tmp_path: Path) -> None:
    overrides = [model(NETWORKS[name]), "training.steps=24", "training.monitor_every=4"]
    killed = {"out": tmp_path / "killed", "kills": 3, "overrides": overrides}
    in_processes(killed, {"out": tmp_path / "whole", "overrides": overrides})
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    ours, theirs = (sample_run(tmp_path / run, 3, allow_code=True) for run in ("killed", "whole"))
    assert images_of(ours) == images_of(theirs)
    assert len(images_of(ours)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_each_network_is_compared_over_two_methods_in_processes_of_their_own(name: str, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    text = NET.with_name("digits.yaml").read_text()
    place = text.partition("model:")[0] + model(NETWORKS[name]).replace("model=", "model: ") + "\n\ndiffusion:"
    recipe.write_text(place + text.partition("diffusion:")[2])
    small = sets("training.steps=20", "training.sample_every=null", "data.validation_count=16", "sampling.steps=2")
    command = ["compare", recipe, "--methods", "none,cs", "--seeds", 2, "--out", tmp_path / "compared", *small]
    done = run(*command, "--workers", 1)
    assert done.exit_code == 0, done.output
    assert "0 of 2" in done.stdout
    folders = sorted((tmp_path / "compared" / "runs").glob("*/seed-*"))
    assert len(folders) == 4
    kept: list[Any] = [Run(folder).config(allow_code=True).model.skips for folder in folders]
    assert kept[0] and all(skips == kept[0] for skips in kept)


@pytest.mark.slow
def test_two_processes_train_it_as_one_does(tmp_path: Path) -> None:
    overrides = [model(), "training.steps=6"]
    alone, shared = ({"out": tmp_path / f"{count}", "processes": count, "overrides": overrides} for count in (1, 2))
    in_processes(alone, shared)
    ours, theirs = (weights_of(tmp_path / name) for name in ("1", "2"))
    # 1e-5: a mean over other parts of the batch.
    assert all(torch.allclose(value, theirs[name], rtol=1e-4, atol=1e-5) for name, value in ours.items())


def weights_of(out: Path) -> dict[str, Tensor]:
    checkpoint = Run(out).checkpoints().latest()
    assert checkpoint is not None
    return checkpoint.tensors("model")


@pytest.mark.slow
def test_kappa_is_advised_for_it(tmp_path: Path) -> None:
    text = NET.with_name("digits.yaml").read_text().replace("net.py:build", f"{NET}:build")
    (tmp_path / "mine.yaml").write_text(text)
    done = run("kappa", tmp_path / "mine.yaml", "--json")
    assert done.exit_code == 0, done.output
    assert '"num_skips": 3' in done.stdout
