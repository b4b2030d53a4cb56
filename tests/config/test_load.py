"""Laws of recipes: what a file says is what the config holds, and an error names file, line and closest key."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from scalelong import METHODS
from scalelong.config import load
from scalelong.config.load import RecipeError, load_recipe, parse_recipe, recipe_names, to_yaml
from scalelong.config.schema import Config, ScalingConfig
from scalelong.config.sections import DiffusionConfig
from scalelong.diffusion import SCHEDULES
from scalelong.skips.gates import ACTIVATIONS

RECIPE = """\
name: small
data:
  source: sklearn:digits
  image_size: 8
  channels: 1
model:
  kind: uvit
  img_size: 8
  patch_size: 2
  in_chans: 1
  embed_dim: 32
  depth: 4
  num_heads: 2
optim:
  lr: 1e-3
  betas: [0.9, 0.99]
training:
  steps: 100
  batch_size: 64
scaling:
  method: cs
  kappa: 0.7
"""

UNET = """\
  kind: unet
  sample_size: 8
  in_channels: 1
  block_out_channels: [8, 16]
  depth: 2
  attention: [4]
  norm_num_groups: 4
"""

SCALING = "scaling:\n  method: cs\n  kappa: 0.7"
UVIT = RECIPE[RECIPE.index("  kind") : RECIPE.index("optim:")]


SMALL = parse_recipe(RECIPE)


def replaced(old: str, new: str) -> str:
    assert old in RECIPE
    return RECIPE.replace(old, new)


def complaint(text: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, overrides, file="recipes/x.yaml")
    return str(caught.value)


# --- reading


def test_a_recipe_holds_what_its_file_says() -> None:
    config = parse_recipe(RECIPE)
    assert (config.name, config.seed) == ("small", 0)
    assert (config.optim.lr, config.optim.betas) == (0.001, (0.9, 0.99))
    assert (config.training.steps, config.training.batch_size) == (100, 64)
    assert (config.scaling.method, config.scaling.options) == ("cs", {"kappa": 0.7})
    assert config.model.kind == "uvit" and config.model.depth == 4


@pytest.mark.parametrize("written", ["1e-3", "1E-3", "0.001", ".001", "1.e-3", "+1.0e-03", "0.1e-2"])
def test_a_number_may_be_written_in_any_usual_way(written: str) -> None:
    assert parse_recipe(replaced("lr: 1e-3", f"lr: {written}")).optim.lr == 0.001
    assert parse_recipe(RECIPE, [f"optim.lr={written}"]).optim.lr == 0.001


def test_whole_numbers_may_group_their_digits_and_floats_may_be_whole() -> None:
    config = parse_recipe(RECIPE, ["training.steps=500_000", "scaling.kappa=1"])
    assert config.training.steps == 500_000
    assert config.scaling.kappa == 1.0


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("training.steps='100'", "must be a valid integer, got '100'"),
        ("training.steps=010", "must be a valid integer, got '010'"),
        ("training.steps=100.0", "must be a valid integer, got 100.0"),
        ("training.steps=true", "must be a valid integer, got True"),
        ("training.steps=", "must be a valid integer, got None"),
        ("training.steps=0", "must be greater than or equal to 1, got 0"),
        (f"training.steps={10**400}", f"must be less than or equal to {2**53}, got {10**400}"),
        ("training.compile=yes", "must be a valid boolean, got 'yes'"),
        ("training.compile=1", "must be a valid boolean, got 1"),
        ("optim.lr=fast", "must be a valid number, got 'fast'"),
        ("optim.lr=-1e-3", "must be greater than 0, got -0.001"),
        ("optim.lr=.inf", "must be a valid number, got '.inf'"),
        ("seed=-1", "must be greater than or equal to 0, got -1"),
        ("name=3", "must be a valid string, got 3"),
    ],
)
def test_a_value_of_the_wrong_type_or_size_is_never_bent_into_shape(override: str, problem: str) -> None:
    key = override.partition("=")[0]
    assert complaint(RECIPE, override) == f"override {override!r}: {key}: {problem}"


def test_a_config_cannot_be_changed() -> None:
    config = parse_recipe(RECIPE)
    for section, key in ((config, "seed"), (config.optim, "lr"), (config.data, "flip"), (config.model, "depth")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, key, 2)
    assert hash(config) == hash(parse_recipe(RECIPE))


# --- errors name the place


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  lr:", "  learning_rate:", "15: optim.learning_rate: unknown key; did you mean 'optim.lr'?"),
        ("  depth:", "  dept:", "12: model.dept: unknown key; did you mean 'model.depth'?"),
        ("scaling:", "scalling:", "20: scalling: unknown key; did you mean 'scaling'?"),
        ("steps: 100", "steps: 100\n  lr: 3", "19: training.lr: unknown key; did you mean 'optim.lr'?"),
        ("  kappa:", "  zzz:", "22: scaling.zzz: unknown key; scaling has method, where, kappa, value, ratio, "),
        ("steps: 100", "steps: many", "18: training.steps: must be a valid integer, got 'many'"),
        ("betas: [0.9, 0.99]", "betas:\n    - 0.9\n    - 2", "18: optim.betas[1]: must be less than 1, got 2"),
        ("uvit", "vit", "7: model.kind: must be one of 'uvit', 'unet', 'python', got 'vit'; did you mean 'uvit'?"),
        ("  kind: uvit\n", "", "6: model.kind: is missing"),
        ("method: cs", "method: css", "21: scaling.method: must be one of 'none', 'uniform', 'cs', "),
        (SCALING, "scaling: cs", "20: scaling: must be a section with keys of its own, got 'cs'"),
        ("method: cs", "method: ls", "22: scaling.kappa: method 'ls' has no such option; its options: ratio, "),
        ("num_heads: 2", "num_heads: 3", "13: model.num_heads: must divide embed_dim (32)"),
        ("patch_size: 2", "patch_size: 3", "9: model.patch_size: must divide img_size (8)"),
        ("steps: 100", "steps: 100\n  grad_accumulation: 3", "20: training.batch_size: must be a multiple of "),
        ("  channels: 1", "  channels: 2", "5: data.channels: must be one of 1, 3, got 2"),
        ("  image_size: 8", "  image_size: 16", "6: model: denoises C×H×W = 1×8×8, but the data gives 1×16×16"),
    ],
)
def test_an_error_names_file_line_and_key(old: str, new: str, message: str) -> None:
    lines = complaint(replaced(old, new)).splitlines()
    assert any(line.startswith(f"recipes/x.yaml:{message}") for line in lines), lines


def test_the_example_of_the_documentation() -> None:
    text = replaced("lr: 1e-3", "learning_rate: 1e-3")
    assert complaint(text).splitlines() == [
        "recipes/x.yaml:14: optim.lr: is missing",
        "recipes/x.yaml:15: optim.learning_rate: unknown key; did you mean 'optim.lr'?",
    ]


def test_every_problem_is_reported_at_once() -> None:
    text = replaced("steps: 100", "steps: x").replace("kappa: 0.7", "kappa: 2").replace("depth: 4", "depth: 5")
    assert complaint(text).splitlines() == [
        "recipes/x.yaml:12: model.depth: must be a multiple of 2, got 5",
        "recipes/x.yaml:18: training.steps: must be a valid integer, got 'x'",
        "recipes/x.yaml:22: scaling.kappa: must be less than or equal to 1, got 2",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "recipes/x.yaml:1: a recipe is a list of 'key: value' lines, got None"),
        ("- a\n- b\n", "recipes/x.yaml:1: a recipe is a list of 'key: value' lines, got ['a', 'b']"),
        ("name: a\nseed: 1\nname: b\n", "recipes/x.yaml:3: name is already set on line 1"),
        ("optim:\n  lr: 1\n  lr: 2\n", "recipes/x.yaml:3: optim.lr is already set on line 2"),
        ("name: a\n3: b\n", "recipes/x.yaml:2: a key must be text"),
        ("name: a\n  seed: 3\n", "recipes/x.yaml:2: mapping values are not allowed here"),
        ("name: !!python/object:os.system a\n", "recipes/x.yaml:1: could not determine a constructor for the tag"),
        ("name: a\n---\nname: b\n", "recipes/x.yaml:2: but found another document"),
        ("name: \x07\n", "recipes/x.yaml:1: "),
    ],
)
def test_what_is_not_a_recipe_is_refused_with_its_line(text: str, message: str) -> None:
    assert complaint(text).startswith(message)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("scaling.metod=ls", "scaling.metod: unknown key; did you mean 'scaling.method'?"),
        ("steps=3", "steps: unknown key; did you mean 'diffusion.steps' or 'training.steps' or 'sampling.steps'?"),
        ("optm.lr=3", "optm: unknown key; did you mean 'optim'?"),
        ("name.x=3", "name.x: unknown key; name has no keys"),
        (
            "training.trackers=[wndb]",
            "training.trackers[0]: must be one of 'tensorboard', 'wandb', got 'wndb'; did you mean 'wandb'?",
        ),
        (
            "scaling.where=after",
            "scaling.where: must be one of 'input', 'after-norm', got 'after'; did you mean 'after-norm'?",
        ),
        *(
            (
                f"data.box={box}",
                "data.box: must be [left, top, right, bottom] with 0 ≤ left < right and 0 ≤ top < bottom, got " + box,
            )
            for box in ("[25, 57, 25, 185]", "[25, 185, 153, 57]", "[-1, 0, 8, 8]", "[0, 0, 8]")
        ),
        ("optim.lr", "write it as section.key=value, for instance optim.lr=1e-3"),
        ("optim..lr=1", "write it as section.key=value, for instance optim.lr=1e-3"),
        ("=1", "write it as section.key=value, for instance optim.lr=1e-3"),
        ("optim.betas=[0.9", "expected ',' or ']', but got '<stream end>'"),
        ("scaling.value=0.5", "scaling.value: method 'cs' has no such option; its options: kappa"),
    ],
)
def test_an_error_in_an_override_names_the_override(override: str, message: str) -> None:
    assert complaint(RECIPE, override) == f"override {override!r}: {message}"


# --- overrides


def test_overrides_replace_single_keys_and_the_last_one_counts() -> None:
    overrides = [
        "optim.lr=2",
        "optim.betas=[0.5, 0.6]",
        "optim.clip_norm=1.5",
        "diffusion.time=continuous",
        "optim.lr=3",
    ]
    config = parse_recipe(RECIPE, overrides)
    assert (config.optim.lr, config.optim.betas, config.optim.clip_norm) == (3.0, (0.5, 0.6), 1.5)
    assert config.diffusion.time == "continuous"
    plain = parse_recipe(RECIPE)
    assert (config.data, config.model, config.training) == (plain.data, plain.model, plain.training)


def test_null_turns_an_option_off() -> None:
    text = replaced("  betas", "  clip_norm: 1.0\n  betas")
    assert parse_recipe(text, ["optim.clip_norm=null"]).optim.clip_norm is None


@pytest.mark.parametrize("method", METHODS)
def test_another_method_leaves_behind_the_options_that_it_does_not_have(method: str) -> None:
    scaling = parse_recipe(RECIPE, [f"scaling.method={method}"]).scaling
    assert scaling.method == method
    assert scaling.options == ({"kappa": 0.7} if method in ("cs", "cs-reversed") else {})


def test_an_option_given_with_another_method_must_be_its_own() -> None:
    assert parse_recipe(RECIPE, ["scaling.method=ls", "scaling.ratio=8"]).scaling.options == {"ratio": 8}
    assert complaint(RECIPE, "scaling.method=ls", "scaling.kappa=0.5") == (
        "override 'scaling.kappa=0.5': scaling.kappa: method 'ls' has no such option; "
        "its options: ratio, activation, init, gate"
    )


# --- writing


NUMBERS = st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False)
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]))
LOOKS_LIKE_SOMETHING_ELSE = [
    *("1e-3", ".5", "010", "1_000", "0x1f", "1:30", "2024-01-01", "yes", "null", "~", ""),
    *("a: b", "# c", "'", "<<", "- d", "two\nlines", "two\x85lines"),
]


@settings(max_examples=40)
@given(lr=NUMBERS, beta=st.floats(0, 1, exclude_max=True), seed=st.integers(0, 2**63 - 1), text=TEXT)
def test_a_written_config_reads_back_equal(lr: float, beta: float, seed: int, text: str) -> None:
    optim = SMALL.optim.model_copy(update={"lr": lr, "betas": (beta, 0.5)})
    config = SMALL.model_copy(update={"optim": optim, "seed": seed, "description": text})
    assert parse_recipe(to_yaml(config)) == config


@pytest.mark.parametrize("text", LOOKS_LIKE_SOMETHING_ELSE)
def test_text_that_looks_like_something_else_stays_text(text: str) -> None:
    config = SMALL.model_copy(update={"description": text})
    assert parse_recipe(to_yaml(config)).description == text


@pytest.mark.parametrize("name", recipe_names())
def test_the_recipes_of_the_package_read_back_equal(name: str) -> None:
    config = load_recipe(name)
    assert parse_recipe(to_yaml(config)) == config


def test_a_written_config_spells_out_every_key() -> None:
    written = parse_recipe(RECIPE).model_dump(mode="json")
    assert set(written) == set(Config.model_fields)
    assert set(written["scaling"]) == set(ScalingConfig.model_fields)


# --- finding


def test_the_recipes_of_the_package_carry_the_names_of_their_files() -> None:
    assert {"digits", "fashion", "cifar10-tiny-unet", "cifar10-tiny-uvit"} <= set(recipe_names())
    for name in recipe_names():
        assert load_recipe(name).name == name


def test_a_path_is_read_and_named_as_one_would_type_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text(RECIPE, encoding="utf-8")
    assert load_recipe(str(tmp_path / "mine.yaml")) == load_recipe(tmp_path / "mine.yaml") == parse_recipe(RECIPE)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.yaml").write_text("nam: x\n", encoding="utf-8")
    with pytest.raises(RecipeError, match=r"(?m)^broken\.yaml:1: nam: unknown key; did you mean 'name'\?$"):
        load_recipe("broken.yaml")


def test_a_recipe_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no recipe 'digit'; did you mean 'digits'. Recipes: .*fashion"):
        load_recipe("digit")
    with pytest.raises(RecipeError, match=r"no recipe file '.*nowhere\.yaml'"):
        load_recipe(str(tmp_path / "nowhere.yaml"))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match=r"binary\.yaml: is not text in UTF-8"):
        load_recipe(tmp_path / "binary.yaml")


def test_an_installed_package_brings_its_recipes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "scalelong" / "recipes" / "load.py"
    (tmp_path / "scalelong" / "recipes").mkdir(parents=True)
    (tmp_path / "scalelong" / "recipes" / "only.yaml").write_text(replaced("small", "only"), encoding="utf-8")
    monkeypatch.setattr(load, "__file__", str(module))
    assert recipe_names() == ["only"]
    assert load_recipe("only").name == "only"


# --- the config knows what the rest of the package has


def test_every_option_of_every_method_can_be_set() -> None:
    kinds = [kind for kind in METHODS.values() if kind is not None]
    options = {option for kind in kinds for option in list(inspect.signature(kind).parameters)[1:]}
    # num_skips is for those who scale some of the skips; a recipe scales all.
    assert options - {"num_skips"} == ScalingConfig.model_fields.keys() - {"method", "where"}


def test_the_choices_are_those_of_the_package() -> None:
    assert set(get_args(DiffusionConfig.model_fields["schedule"].annotation)) == set(SCHEDULES)
    activations = get_args(ScalingConfig.model_fields["activation"].annotation)
    assert set(get_args(activations[0])) == set(ACTIVATIONS)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("sample_size: 8", "sample_size: 7", "model.sample_size: must be a multiple of 2 for so many levels"),
        ("attention: [4]", "attention: [16]", "model.attention: 16 is no resolution of this network; there are 8, 4"),
        ("norm_num_groups: 4", "norm_num_groups: 3", "model.norm_num_groups: must divide every width, and not 8"),
        ("block_out_channels: [8, 16]", "block_out_channels: []", "model.block_out_channels: "),
        ("depth: 2", "num_heads: 2\n  depth: 2", "model.num_heads: unknown key"),
    ],
)
def test_a_unet_has_limits_of_its_own(old: str, new: str, problem: str) -> None:
    text = replaced(UVIT, UNET)
    assert parse_recipe(text).model.image_shape == (1, 8, 8)
    assert f": {problem}" in complaint(text.replace(old, new))


def test_the_keys_that_others_rely_on_can_be_overridden_in_every_recipe() -> None:
    overrides: dict[str, Any] = {
        "training.steps": 7,
        "training.batch_size": 12,
        "training.checkpoint_every": 3,
        "optim.lr": 0.5,
        "model.depth": 2,
        "scaling.method": "cs",
        "scaling.kappa": 0.25,
        "seed": 9,
    }
    for name in recipe_names():
        config = load_recipe(name, [f"{key}={value}" for key, value in overrides.items()])
        for key, value in overrides.items():
            section, _, last = key.rpartition(".")
            assert getattr(getattr(config, section) if section else config, last) == value
