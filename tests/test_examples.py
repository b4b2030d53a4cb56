"""Every example runs, says what the monitor saw, and ships a network that computes the same when it is loaded again."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from families.standins_lucidrains import Unet

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

pytestmark = pytest.mark.filterwarnings("ignore::scalelong.AbsorbedScalingWarning")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def say(name: str, folder: Path, steps: int, capsys: pytest.CaptureFixture[str]) -> str:
    """What an example prints."""
    load(name).main(folder, steps)
    said = capsys.readouterr().out
    assert re.search(r"(steady|growing|failing) since step \d+", said), said
    return said


def test_the_edm_loop_averages_a_scaled_copy_and_ships_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "computes the same: True" in say("edm", tmp_path / "edm", 20, capsys)


@pytest.mark.slow
def test_the_diffusers_loop_ships_a_pipeline_and_a_network_to_go_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from diffusers import DDPMPipeline, UNet2DModel

    assert "sampled: " in say("train_unconditional", tmp_path, 20, capsys)
    assert (tmp_path / "sample.png").is_file()
    assert not hasattr(DDPMPipeline.from_pretrained(tmp_path).unet, "skip_scaling")
    with pytest.raises(ValueError, match="scaled by scalelong"):
        UNet2DModel.from_pretrained(tmp_path / "scaled")


@pytest.mark.slow
def test_lora_starts_from_the_same_function_and_ends_as_a_plain_unet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = say("lora", tmp_path / "unet", 20, capsys)
    changes = [float(number) for number in re.findall(r"by at most (\S+)", said)]
    # 1e-5: weights divided by a coefficient that then multiplies what they read.
    assert len(changes) == 2 and max(changes) < 1e-5
    assert "κ = 0.7000" not in said


@pytest.mark.slow
def test_lucidrains_unet_is_shipped_with_its_scaling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        import denoising_diffusion_pytorch  # pyright: ignore[reportMissingImports] # noqa: F401
    except ImportError:  # It needs torchvision.
        standin = ModuleType("denoising_diffusion_pytorch")
        standin.Unet = Unet  # pyright: ignore[reportAttributeAccessIssue]
        monkeypatch.setitem(sys.modules, "denoising_diffusion_pytorch", standin)
    assert "computes the same: True" in say("lucidrains", tmp_path / "net", 20, capsys)


@pytest.mark.slow
def test_monai_ships_a_folded_network_that_samples_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("monai")
    said = say("monai_loop", tmp_path / "net", 20, capsys)
    # 1e-4: a product in another order at each of 20 steps.
    assert float(said.split("the same to ")[1]) < 1e-4


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Lightning's own.
def test_lightning_trains_and_ships_a_scaled_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lightning", reason="Lightning is not installed: pip install lightning")
    assert "computes the same: True" in say("lightning_module", tmp_path / "net", 20, capsys)
