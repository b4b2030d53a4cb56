"""Laws of `kind: python`: whose code runs, which code that is, and what is noted of its network."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest
import torch
from own_cases import HOME_MADE, NET, NETWORKS, model
from run_cases import tiny
from safetensors.torch import save_file
from torch import Tensor

from scalelong import find_skips, scale_skips
from scalelong.config import RecipeError, build_model, load_recipe, parse_recipe, to_yaml
from scalelong.config.build import build_network, conditioning_of, example_call, known_sites, note_start, summarise
from scalelong.config.own import build_own, code_digest
from scalelong.diffusion.guidance import Condition

pytestmark = pytest.mark.filterwarnings("ignore::scalelong.AbsorbedScalingWarning")

RECIPE = """
name: mine
data: {source: "sklearn:digits", image_size: 8, channels: 1}
model:
  kind: python
  factory: net.py:build
  image_shape: [1, 8, 8]
optim: {lr: 1e-3}
training: {steps: 1, batch_size: 8}
scaling: {method: cs}
"""


def own(*overrides: str, factory: str = HOME_MADE, more: str = ""):
    return tiny(model(factory, more), *overrides)


def write_net(folder: Path, body: str) -> str:
    """A file with a factory, as a recipe names it."""
    (folder / "mine.py").write_text(f"import torch\nfrom torch import nn\n{body}\n")
    return f"{folder / 'mine.py'}:build"


@pytest.mark.parametrize("name", NETWORKS)
def test_the_skips_of_ones_own_network_are_those_that_are_found_or_traced(name: str) -> None:
    config = own(factory=NETWORKS[name])
    network = build_network(config)
    expected = find_skips(network, example_call(config))
    noted = note_start(config)
    assert known_sites(network, config) == noted.model.sites == expected
    # And as the run's recipe keeps them.
    assert parse_recipe(to_yaml(noted)).model.sites == expected
    scaled = build_model(noted)
    again = scale_skips(build_network(config), "cs", example_inputs=example_call(config))
    assert scaled.state_dict().keys() == again.state_dict().keys()


def test_skips_that_are_noted_are_not_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = note_start(own())
    monkeypatch.setattr("scalelong.config.build.find_skips", lambda *_: pytest.fail("traced again"))
    monkeypatch.setattr("scalelong.config.own.find_skips", lambda *_: pytest.fail("traced again"))
    assert note_start(noted) == noted
    assert build_model(noted).skip_scaling.coefficients.tolist() == pytest.approx([1.0, 0.7])


def test_the_network_is_a_function_of_the_recipe_and_leaves_the_random_state_alone() -> None:
    state = torch.get_rng_state()
    first, second, other = (build_model(own(f"seed={seed}")).state_dict() for seed in (1, 1, 2))
    assert summarise(own()).parameters > 0
    note_start(own())
    assert torch.get_rng_state().equal(state)
    assert all(first[name].equal(second[name]) for name in first)
    assert not first["enter.weight"].equal(other["enter.weight"])
    plain = build_model(own("scaling.method=none", "seed=1")).state_dict()
    assert all(first[name].equal(plain[name]) for name in plain)


def test_a_path_is_seen_from_the_recipe_then_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "net.py").write_text(NET.read_text())
    (tmp_path / "nets" / "mine.yaml").write_text(RECIPE)
    (tmp_path / "elsewhere.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path / "nets")
    wanted = f"{tmp_path / 'nets' / 'net.py'}:build"
    assert load_recipe("../nets/mine.yaml").model.factory == wanted
    assert load_recipe("../elsewhere.yaml").model.factory == wanted
    assert load_recipe("../elsewhere.yaml", ["model.factory=net.py:build"]).model.factory == wanted
    assert load_recipe("../elsewhere.yaml", ["model.factory=monai.networks.nets:UNet"]).model.factory[:5] == "monai"


def test_a_file_may_import_what_lies_beside_it_and_takes_the_place_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "parts_of_mine.py").write_text("from torch import nn\nLayer = nn.Linear\n")
    (tmp_path / "queue.py").write_text("raise RuntimeError('not the one of Python')\n")
    body = "import queue\nfrom parts_of_mine import Layer\ndef build(): return Layer(queue.Queue().qsize() + 1, 1)"
    path = list(sys.path)
    assert build_own(own(factory=write_net(tmp_path, body)).model).in_features == 1
    assert sys.path == path


def test_reading_a_recipe_runs_no_code(tmp_path: Path) -> None:
    factory = write_net(tmp_path, "raise SystemExit('code ran')")
    config = own(factory=factory)
    assert parse_recipe(to_yaml(config)) == config
    with pytest.raises(SystemExit, match="code ran"):
        build_model(config)


@pytest.mark.parametrize("name", ["home-made", "monai"])
def test_the_digest_is_that_of_the_file_with_the_factory(name: str) -> None:
    config = own(factory=NETWORKS[name]).model
    digest = code_digest(config)
    build_own(config.model_copy(update={"code_sha256": digest}))
    with pytest.raises(ValueError, match=r"is not the code that this run began with \(sha256 000000000000…, now "):
        build_own(config.model_copy(update={"code_sha256": "0" * 64}))


def test_changed_code_does_not_run_and_what_was_loaded_is_not_mixed_up(tmp_path: Path) -> None:
    factory = write_net(tmp_path, "def build(): return nn.Linear(1, 1)")
    config = own(factory=factory).model
    noted = config.model_copy(update={"code_sha256": code_digest(config)})
    assert build_own(noted).out_features == 1
    write_net(tmp_path, "raise SystemExit('changed code ran')")
    with pytest.raises(ValueError, match="put it back as it was, from the copy in the run's folder code/, or begin"):
        build_own(noted)
    write_net(tmp_path, "def build(): return nn.Linear(1, 2)")
    assert build_own(config).out_features == 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def build(): return 1", "returned a int, not a torch.nn.Module"),
        ("def build(width): return nn.Linear(width, 1)", r"build\(\) failed: TypeError: .*width"),
        ("def build(): raise KeyError('depth')", r"build\(\) failed: KeyError: 'depth' \(mine\.py:3\)"),
        ("import not_there_at_all", r"failed: ModuleNotFoundError: .* \(mine\.py:3\)"),
        ("def build(:", r"failed: SyntaxError"),
        ("def create(): pass", "there is no function build; the file has create"),
    ],
)
def test_what_goes_wrong_in_the_users_code_is_said_with_its_place(body: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(own(factory=write_net(tmp_path, body)))


def test_a_network_that_does_not_fit_is_refused_before_training(tmp_path: Path) -> None:
    class_text = "class Net(nn.Module):\n def forward(self, x, t): return {}\ndef build(): return Net()"
    short = write_net(tmp_path, class_text.format("x[:, :, :4]"))
    with pytest.raises(ValueError, match=r"gives 2×1×4×8 for images of 2×1×8×8, and must give as many numbers"):
        note_start(own(factory=short))
    unscalable = write_net(tmp_path, class_text.format("x + 0"))
    with pytest.raises(ValueError, match="no long skip connections found in Net"):
        note_start(own(factory=unscalable))
    assert note_start(own("scaling.method=none", factory=unscalable)).model.skips is None
    with pytest.raises(RecipeError, match=r"model: denoises C×H×W = 3×8×8, but the data gives 1×8×8"):
        own("model.image_shape=[3, 8, 8]")
    with pytest.raises(RecipeError, match=r"model\.factory: .* got 'net'"):
        own("model.factory=net")
    with pytest.raises(ValueError, match=r"model\.factory: cannot read the code in .*absent\.py"):
        build_model(own(factory=f"{tmp_path}/absent.py:build"))
    with pytest.raises(ValueError, match=r"model\.skips cannot be read: KeyError"):
        build_model(own(more=", skips: [{index: 1}]"))


def test_a_condition_comes_after_image_and_time() -> None:
    labels = ("data.label_column=label", "labels={classes: 10, drop: 0.1}")
    config = own(*labels, factory=HOME_MADE.replace("depth: 2", "depth: 2, classes: 11"))
    network, conditioning = build_model(config).eval(), conditioning_of(config)
    x, t, _ = example_call(config)
    seen: list[tuple[Tensor, ...]] = []
    network.register_forward_pre_hook(lambda module, args: seen.append(args))
    with torch.no_grad():
        two, none = Condition(torch.tensor([2, 2])), Condition(torch.tensor([10, 10]))
        guided = conditioning.guided(network, two, 2.0)(x, t)
        free, bound = (conditioning.predictor(network, condition)(x, t) for condition in (none, two))
    torch.testing.assert_close(guided, free + 2 * (bound - free), rtol=1e-4, atol=1e-5)
    assert [len(args) for args in seen] == [3, 3, 3]


@pytest.mark.parametrize("kind", ["python", "uvit"])
def test_training_starts_from_the_weights_that_the_recipe_names(kind: str, tmp_path: Path) -> None:
    def config(*overrides: str):
        return own(*overrides) if kind == "python" else tiny(*overrides)

    plain, scaled = build_model(config("scaling.method=none", "seed=5")), build_model(config("seed=6"))
    save_file(plain.state_dict(), tmp_path / "plain.safetensors")
    save_file(scaled.state_dict(), tmp_path / "scaled.safetensors")
    for name, source in (("plain", plain), ("scaled", scaled)):
        started = build_model(config(f"model.weights={tmp_path}/{name}.safetensors")).state_dict()
        assert all(started[key].equal(value) for key, value in source.state_dict().items())
        assert any("skip_scaling" in key for key in started)
    noted = note_start(config(f"model.weights={tmp_path}/plain.safetensors"))
    save_file(scaled.state_dict(), tmp_path / "plain.safetensors")
    with pytest.raises(ValueError, match="is not the file that this run begins with"):
        build_model(noted)
    build_model(noted, fresh=False)


def test_weights_that_do_not_fit_are_refused_with_the_first_that_differs(tmp_path: Path) -> None:
    def config(name: str):
        return own("scaling.method=none", f"model.weights={tmp_path}/{name}")

    state = build_model(own("scaling.method=none")).state_dict()
    save_file({**state, "enter.weight": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"of another network: enter\.weight is \(1,\) there and \(8, 1, 3, 3\) here"):
        build_model(config("other.safetensors"))
    (tmp_path / "text.safetensors").write_text("no tensors")
    with pytest.raises(ValueError, match=r"model\.weights: text\.safetensors is no safetensors file"):
        build_model(config("text.safetensors"))
    with pytest.raises(ValueError, match=r"model\.weights: cannot read .*absent"):
        note_start(config("absent"))


def test_a_noted_recipe_can_be_sent_to_another_process() -> None:
    config = note_start(own())
    sent = pickle.loads(pickle.dumps(config))
    assert sent == config and sent.model.sites == config.model.sites


def test_the_lines_of_the_page_are_a_recipe_of_the_network_beside_it(tmp_path: Path) -> None:
    page = (NET.parents[2] / "docs" / "own-network.md").read_text()
    first, monai = (block.partition("```")[0] for block in page.split("```yaml\n")[1:])
    base = NET.with_name("digits.yaml").read_text()
    outer = [part.split("\nmodel:")[0] for part in (base, "\ndiffusion:" + base.partition("\ndiffusion:")[2])]
    (tmp_path / "net.py").write_text(NET.read_text())
    for block in (first, monai):
        text = outer[0] + "\n" + block + outer[1].partition("\nscaling:")[0]
        config = parse_recipe(text, folder=tmp_path)
        assert note_start(config).model.sites
