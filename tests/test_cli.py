"""The command line: what `scalelong inspect` shows, when it warns, and how it fails."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from command_line import TERMINAL, assert_fails, run, sets
from huggingface_hub.utils import LocalEntryNotFoundError, RepositoryNotFoundError
from own_cases import NET

import scalelong.cli
from scalelong import AbsorbedScalingWarning, constant_coefficients, find_skips, scale_skips, surviving_share
from scalelong.cli.inspect import inspect_model
from scalelong.cli.loading import load_model
from scalelong.models import UViT, preset_names
from scalelong.models.presets import find_preset
from scalelong.skips.hooks import attached_hooks

UNET = {
    "_class_name": "UNet2DModel",
    "sample_size": 8,
    "block_out_channels": [8, 16],
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "down_block_types": ["DownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "UpBlock2D"],
}


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TERMINAL:
        monkeypatch.delenv(name, raising=False)


def inspect(*arguments: str) -> dict[str, Any]:
    """What `scalelong inspect … --json` prints."""
    result = run("inspect", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def kinds(inspection: dict[str, Any]) -> list[str]:
    return [warning["kind"] for warning in inspection["warnings"]]


def write_json(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def run_process(*arguments: str, **env: str) -> Any:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=os.environ | env)


# What it shows


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_inspected_with_its_size_and_its_skips(name: str) -> None:
    inspection = inspect(name, "--method", "none")
    row = find_preset(name)
    assert (inspection["parameters"], inspection["num_skips"]) == (row.parameters, row.num_skips)
    assert [skip["coefficient"] for skip in inspection["skips"]] == [1.0] * row.num_skips
    assert inspection["sum_of_squares"] == row.num_skips


@pytest.mark.parametrize("name", ["cifar10-uvit-s2", "cifar10-unet"])
def test_rows_are_the_sites_with_their_coefficients_and_measured_shares(name: str) -> None:
    inspection = inspect(name, "--method", "cs", "--kappa", "0.6")
    model = load_model(name)
    sites = find_skips(model)
    constants = constant_coefficients(len(sites), 0.6)
    for skip, site, constant in zip(inspection["skips"], sites, constants.tolist(), strict=True):
        shown = tuple(skip[key] for key in ("index", "consumer", "entry", "width", "absorbed", "coefficient"))
        assert shown == (site.index, site.consumer, str(site.entry), site.width, site.absorbed, constant)
        assert skip["share"] == (None if constant == 1 else surviving_share(model, site, constant))
    assert inspection["sum_of_squares"] == constants.square().sum().item()


@pytest.mark.parametrize(
    ("name", "follows"), [("cifar10-uvit-s2", ["Linear"]), ("cifar10-unet", ["GroupNorm", "Conv2d 1×1"])]
)
def test_what_follows_is_what_reads_the_skip_first(name: str, follows: list[str]) -> None:
    assert all(skip["follows"] == follows for skip in inspect(name)["skips"])


def test_after_the_norm_all_of_the_scaling_survives() -> None:
    inspection = inspect("cifar10-unet", "--kappa", "0.5", "--where", "after-norm")
    assert [skip["share"] for skip in inspection["skips"]] == [None] + [1.0] * 11
    assert {skip["shrinkage"] for skip in inspection["skips"]} == {0.0}


def test_without_options_it_is_cs_at_the_input_with_the_default_kappa() -> None:
    plain = inspect("cifar10-uvit-s2")
    assert plain == inspect("cifar10-uvit-s2", "--method", "cs", "--kappa", "0.7", "--where", "input")


@pytest.mark.parametrize(("method", "added"), [("ls", 8497), ("ls-individual", 6 * 8497), ("ie", 514), ("norm", 6)])
def test_a_coefficient_that_depends_on_the_input_is_shown_as_such_with_its_cost(method: str, added: int) -> None:
    inspection = inspect("cifar10-uvit-s2", "--method", method)
    assert inspection["added_parameters"] == added
    assert inspection["sum_of_squares"] is None
    assert {(skip["coefficient"], skip["share"]) for skip in inspection["skips"]} == {(None, None)}
    table = run("inspect", "cifar10-uvit-s2", "--method", method).stdout
    assert f"{added:,} added parameters" in table
    assert table.count("by input") == 6


@pytest.mark.parametrize(
    ("arguments", "expected", "added"),
    [
        ("--method learnable", [1.0] * 6, "6 added parameters"),
        ("--method learnable --init 0.25", [0.25] * 6, "6 added parameters"),
        ("--method learned-kappa --init 0.5", [0.5**i for i in range(6)], "1 added parameter"),
    ],
)
def test_a_learned_coefficient_is_shown_at_its_start(arguments: str, expected: list[float], added: str) -> None:
    skips = inspect("cifar10-uvit-s2", *arguments.split())["skips"]
    assert [skip["coefficient"] for skip in skips] == pytest.approx(expected, rel=1e-6)
    table = run("inspect", "cifar10-uvit-s2", *arguments.split()).stdout
    assert f"{added}, " in table
    assert "the start" in table


def test_the_value_of_uniform_is_every_coefficient() -> None:
    skips = inspect("cifar10-uvit-s2", "--method", "uniform", "--value", "0.25")["skips"]
    assert [skip["coefficient"] for skip in skips] == [0.25] * 6


def test_inspecting_leaves_the_model_as_it_was() -> None:
    model = UViT(img_size=8, embed_dim=32, depth=4, num_heads=2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inspect_model(model, "cs", kappa=0.5)
    assert list(attached_hooks(model)) == []
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# When it warns


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("cifar10-uvit-s2 --kappa 0.7", []),
        ("cifar10-uvit-s2 --kappa 0.1", ["fp16"]),
        ("cifar10-uvit-s2 --method uniform --value 6.2e-5", []),
        ("cifar10-uvit-s2 --method uniform --value 6.0e-5", ["fp16"]),
        ("cifar10-uvit-s2 --method learnable --init 0", []),
        ("cifar10-uvit-s2 --method learnable --init -1e-5", ["fp16"]),
        ("cifar10-unet --kappa 0.7", ["absorbed"]),
        ("cifar10-unet --kappa 0.5", ["absorbed", "eps"]),
        ("cifar10-unet --kappa 0.5 --where after-norm", []),
        ("cifar10-unet --kappa 1", []),
        ("cifar10-unet --method ls", []),
        ("cifar10-unet --method learnable", []),
        ("cifar10-unet --method learnable --init 0", []),
        # Eps is 1e-6 here: an eleventh, then a seventh of the scaled skip's variance.
        ("cifar10-unet --method uniform --value 3.3e-3", ["absorbed"]),
        ("cifar10-unet --method uniform --value 2.6e-3", ["absorbed", "eps"]),
        ("improved-cifar10-unet --kappa 0.5", ["absorbed", "eps", "fp16"]),
        ("improved-cifar10-unet --kappa 0.5 --where after-norm", ["fp16"]),
    ],
)
def test_each_warning_appears_exactly_when_it_should(arguments: str, expected: list[str]) -> None:
    assert kinds(inspect(*arguments.split())) == expected


@pytest.mark.parametrize("arguments", [{"kappa": 0.7}, {"kappa": 0.4}, {"kappa": 0.3}, {"kappa": 0.05}, {"kappa": 1.0}])
def test_absorption_is_reported_exactly_when_scale_skips_warns_of_it(arguments: dict[str, float]) -> None:
    model = load_model("improved-cifar10-unet")
    reported = [caution.kind for caution in inspect_model(model, "cs", **arguments).warnings]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scale_skips(model, "cs", **arguments)
    assert ("absorbed" in reported) == any(issubclass(w.category, AbsorbedScalingWarning) for w in caught)


def test_the_warnings_are_printed_with_the_skips_the_numbers_and_the_remedy() -> None:
    lines = run("inspect", "improved-cifar10-unet", "--kappa", "0.5").stdout.splitlines()
    absorbed, eps, fp16 = (line for line in lines if line.startswith("warning: "))
    assert re.search(r"15 of 16 skips .* in the median \d+\.\d% of .* --where after-norm, or --method ls\.$", absorbed)
    assert re.search(r"eps takes over at skips 8 to 16: with κ_16 = 3\.1e-05 .* --where after-norm\.$", eps)
    assert re.search(r"skip 16: κ_16 = 3\.1e-05 .* normal number 6\.1e-05, .* below 0\.001 become 0.*bf16", fp16)


def test_eps_takes_a_share_of_one_minus_root_half_where_it_equals_the_variance() -> None:
    skips = inspect("cifar10-unet", "--method", "uniform", "--value", "1e-3")["skips"]
    # Two decimals, because the variance is that of a sample.
    assert [skip["shrinkage"] for skip in skips] == pytest.approx([1 - 0.5**0.5] * 12, abs=0.01)


def test_eps_is_not_felt_where_a_group_holds_the_trunk_as_well(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", UNET | {"norm_num_groups": 1})
    inspection = inspect(str(tmp_path), "--method", "uniform", "--value", "1e-4")
    assert [skip["shrinkage"] for skip in inspection["skips"]] == pytest.approx([0.0] * 4, abs=1e-4)
    assert "eps" not in kinds(inspection)


# Which models it reads


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": UNET},
        {"model_index.json": {"unet": ["diffusers", "UNet2DModel"]}, "unet/config.json": UNET},
        {"model_index.json": {"unet": ["diffusers", "UNet2DModel"]}, "config.json": UNET},
        {"model_index.json": {"prior": ["diffusers", "UNet2DModel"]}, "prior/config.json": UNET, "config.json": {}},
    ],
    ids=["model", "pipeline", "pipeline of one folder", "pipeline without a unet"],
)
@pytest.mark.parametrize("place", ["folder", "hub"])
def test_a_diffusers_model_is_built_from_its_config_alone(
    files: dict[str, Any], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, name = tmp_path / "folder", str(tmp_path / "folder")
    if place == "hub":
        repository, name = tmp_path / "models--someone--unet", "someone/unet"
        folder = repository / "snapshots" / "0"
        write_json(repository / "refs" / "main", "0")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for path, content in files.items():
        write_json(folder / path, content)
    inspection = inspect(name)
    assert (inspection["model"], inspection["num_skips"]) == ("UNet2DModel", 4)


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repository: str, file: str, *, local_files_only: bool) -> str:
        asked.append(local_files_only)
        raise LocalEntryNotFoundError("no cable")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert_fails(run("inspect", "someone/unet"), "there is no folder 'someone/unet'.*Hub could not be asked: no cable")
    assert asked == [False, True]


# How it fails


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("inspect cifar10-uvit-s3", "unknown preset .* did you mean 'cifar10-uvit-s2'.*improved-imagenet64-unet"),
        ("inspect cifar10-uvit-s2 --kappa 1.5", r"kappa must lie in \(0, 1\], got 1.5"),
        ("inspect cifar10-uvit-s2 --kappa nan", r"kappa must be a finite number, got nan"),
        ("inspect cifar10-uvit-s2 --kappa half", "Invalid value for '--kappa'"),
        ("inspect cifar10-uvit-s2 --kapa 0.5", "No such option: --kapa"),
        ("inspect cifar10-uvit-s2 --method csr", "unknown method 'csr'. Did you mean 'cs'"),
        ("inspect cifar10-uvit-s2 --method ls --kappa 0.5", "method 'ls' has no option 'kappa'"),
        ("inspect cifar10-uvit-s2 --value 0.5", "method 'cs' has no option 'value'"),
        ("inspect cifar10-uvit-s2 --where norm", "where must be"),
        ("inspect", r"Missing argument 'PRESET\|PATH\|HUB_ID\|PATH.py:FUNCTION'"),
        (f"inspect {NET}:build", "Net is of no known family: give --shape C,H,W to trace it"),
        (f"inspect {NET}:build --shape 8x8", "--shape is channels, height and width, such as 3,32,32, not '8x8'"),
        (f"inspect {NET}:bild --shape 1,8,8", "there is no function bild; the file has sines_and_cosines, build"),
        ("inspect cifar10-unet --shape 1,8,8", "--shape and --set are for PATH.py:FUNCTION or a recipe"),
        ("inspekt", "No such command 'inspekt'"),
        ("inspect /nowhere/unet", "'/nowhere/unet' is not a folder"),
        ("inspect ./nowhere", "'./nowhere' is not a folder"),
        ("inspect nobody/nothing", "no folder 'nobody/nothing'.*offline mode is enabled"),
        (f"inspect {__file__}", "is not a folder; give the diffusers folder that holds config.json"),
    ],
)
def test_a_wrong_call_fails_with_one_line(arguments: str, message: str) -> None:
    assert_fails(run(*arguments.split()), message)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "has no config.json of a diffusers model, and no pipeline with a unet, transformer, decoder or prior"),
        ({"architectures": ["Bert"]}, "has no config.json of a diffusers model"),
        ([], "has no config.json of a diffusers model"),
        ("{", "config.json is not valid JSON"),
        ({"_class_name": "NoSuchModel"}, "is a NoSuchModel, which is no network of diffusers"),
        ({"_class_name": "DDPMScheduler"}, "is a DDPMScheduler, which is no network of diffusers"),
        ({"_class_name": "AutoencoderKL"}, "no long skip connections found in AutoencoderKL"),
        (UNET | {"norm_num_groups": 5}, "UNet2DModel cannot be built from the config of .*divisible"),
    ],
)
def test_a_folder_without_a_unet_fails_with_one_line(config: Any, message: str, tmp_path: Path) -> None:
    if config is not None:
        write_json(tmp_path / "config.json", config)
    assert_fails(run("inspect", str(tmp_path)), message)


def test_a_model_that_the_hub_does_not_have_fails_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> str:
        response: Any = SimpleNamespace(headers={}, request=None)
        raise RepositoryNotFoundError("404\n\nRepository Not Found", response=response)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert_fails(run("inspect", "nobody/nothing"), "no model of that name on the Hugging Face Hub.*hf auth login")


def blocked(*modules: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: [monkeypatch.setitem(sys.modules, module, None) for module in modules] and None


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("cifar10-unet", blocked("diffusers.models.unets.unet_2d")),
        ("{folder}", blocked("diffusers")),
        ("someone/unet", blocked("huggingface_hub", "huggingface_hub.utils")),
    ],
)
def test_a_missing_extra_fails_with_the_pip_command(
    name: str, block: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(tmp_path / "config.json", UNET)
    block(monkeypatch)
    assert_fails(run("inspect", name.format(folder=tmp_path)), r'import.*: pip install "scalelong\[train\]"')


def test_a_missing_command_line_fails_with_the_pip_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "scalelong.cli.app")
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as ended:
        scalelong.cli.main()
    assert ended.value.code == 2
    assert tuple(capsys.readouterr()) == ("", 'error: the command line needs typer: pip install "scalelong[train]"\n')


# How it looks


@pytest.mark.parametrize("arguments", [[], ["--help"], ["inspect", "--help"]])
def test_help_shows_examples(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 0
    assert "scalelong inspect cifar10-unet --method cs --kappa 0.5" in result.stdout


def test_the_examples_of_the_help_are_valid_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_json(tmp_path / "my-pipeline" / "config.json", UNET)
    write_json(tmp_path / "google" / "ddpm-cifar10-32" / "config.json", UNET)
    examples = re.findall(r"^ *scalelong (inspect .*)$", run("--help").stdout, flags=re.MULTILINE)
    assert len(examples) == 4
    assert [run(*example.split()).exit_code for example in examples] == [0] * 4


def test_the_version_is_that_of_the_package() -> None:
    result = run("--version", "inspect")
    assert (result.exit_code, result.stdout) == (0, f"scalelong {scalelong.__version__}\n")


def rows_of(table: str) -> list[list[str]]:
    return [re.split(r" {2,}", line.strip()) for line in table.splitlines() if re.match(r" *\d+ ", line)]


def test_a_pipe_gets_each_skip_on_one_uncut_line_without_colour() -> None:
    done = run_process("-m", "scalelong", "inspect", "cifar10-uvit-s2", "--kappa", "0.5", COLUMNS="20")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    header, method = done.stdout.splitlines()[:2]
    assert header == "cifar10-uvit-s2: UViT, 44,255,328 parameters, N = 6 long skips"
    assert method == "cs, kappa = 0.5, Σκ_i² = 1.33 (the paper aims at 1.22 to 5)"
    assert rows_of(done.stdout)[0] == ["1", "out_blocks.5", "skip", "257", "Linear", "1", "–"]
    assert rows_of(done.stdout)[5] == ["6", "out_blocks.0", "skip", "257", "Linear", "0.0312", "100.0%"]


def test_a_wide_table_is_one_uncut_line_per_skip_in_a_pipe() -> None:
    rows = rows_of(run("inspect", "cifar10-unet", "--kappa", "0.5", COLUMNS="40").stdout)
    entry = "res_hidden_states_tuple[-1]"
    assert len(rows) == 12
    assert rows[11] == ["12", "up_blocks.0", entry, "256", "GroupNorm + Conv2d 1×1", "0.000488", "56.0%"]


def test_a_terminal_of_80_columns_holds_the_widest_preset_uncut() -> None:
    arguments = ("inspect", "improved-imagenet64-unet", "--kappa", "0.5")
    shown = run(*arguments, COLUMNS="80", FORCE_COLOR="1", TERM="xterm").stdout
    assert "\x1b[" in shown
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert max(map(len, plain.splitlines())) <= 80
    words = set(run(*arguments, COLUMNS="80").stdout.replace("─", "").split())
    assert words <= set(plain.replace("─", "").split())


def test_an_output_without_greek_letters_gets_question_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.BytesIO()
    monkeypatch.setattr(sys, "argv", ["scalelong", "inspect", "cifar10-uvit-s2"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii", write_through=True))
    with pytest.raises(SystemExit) as ended:
        scalelong.cli.main()
    assert not ended.value.code
    assert b"??_i? = 1.93" in output.getvalue()


def test_a_network_of_ones_own_is_inspected_before_it_is_trained() -> None:
    by_file = run("inspect", f"{NET}:build", "--shape", "1,8,8", "--set", "width=8", "--set", "depth=2", "--json")
    recipe = NET.with_name("digits.yaml")
    by_recipe = run("inspect", recipe, *sets("model.options.width=8", "model.options.depth=2"), "--json")
    assert by_file.exit_code == by_recipe.exit_code == 0, by_file.output + by_recipe.output
    found = json.loads(by_file.stdout)
    assert found == json.loads(by_recipe.stdout)
    assert [(skip["consumer"], skip["entry"]) for skip in found["skips"]] == [
        ("ups.1", "channels 8:16"),
        ("ups.0", "channels 16:32"),
    ]
    library = run("inspect", "monai.networks.nets:BasicUNet", "--set", "spatial_dims=2")
    assert "BasicUNet" in library.stdout and "N = 4 long skips" in library.stdout
