"""Recipes of strangers and typos: each ends in a line, and soon, whatever it says."""

from __future__ import annotations

import time

import pytest
from command_line import assert_fails, run, sets

from scalelong.config import RecipeError, build_model, load_recipe, parse_recipe, recipe_names, summarise
from scalelong.config.build import check_memory, estimate_parameters
from scalelong.config.load import LARGEST_FILE, recipe_folder

DIGITS = (recipe_folder() / "digits.yaml").read_text()
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 10)
)

BOMBS = {
    "lists": ("a: " + "[" * 5000 + "]" * 5000, "recipe:1: is nested deeper than 20 levels, which no recipe is"),
    "keys": ("{a: " * 5000 + "}" * 5000, "recipe:1: is nested deeper than 20 levels"),
    "lines": ("\n".join(" " * level + "a:" for level in range(500)), "recipe:20: is nested deeper than 20 levels"),
    "itself": ("a: &a {b: *a}", "recipe:1: is nested deeper than 20 levels"),
    "itself in a list": ("a: &a [*a]", "recipe:1: is nested deeper than 20 levels"),
    "laughs": (LAUGHS, "its aliases stand for more than 10,000 keys"),
    "length": ("# " + "x" * LARGEST_FILE, "letters; a recipe has at most 1,048,576"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_recipe_that_stands_for_more_than_a_recipe_is_refused_at_once(bomb: str) -> None:
    text, message = BOMBS[bomb]
    begun = time.process_time()
    with pytest.raises(RecipeError, match=message) as refused:
        parse_recipe(text)
    assert "\n" not in str(refused.value)
    assert time.process_time() - begun < 5


def test_aliases_as_people_use_them_are_read() -> None:
    text = DIGITS.replace("lr: 4e-3", "lr: &rate 4e-3").replace("kappa: 0.7", "kappa: *rate")
    assert parse_recipe(text).scaling.kappa == 4e-3


@pytest.mark.parametrize(
    "value",
    ["!!bool 'x'", "!!int x", "!!float x", "!!timestamp x", "!!binary é", "!!python/name:os.system x", "9" * 5000],
)
def test_a_value_that_is_not_what_its_tag_says_is_named_with_its_place(value: str) -> None:
    with pytest.raises(RecipeError, match=r"^recipe:\d+: "):
        parse_recipe(DIGITS.replace("lr: 4e-3", f"lr: {value}"))


@pytest.mark.parametrize("value", ["{a: 1}", "[1]", "null", "[[1]]"])
@pytest.mark.parametrize(
    "key", ["scaling.method", "sampling.sampler", "model.kind", "name", "data", "model", "training.trackers", "scaling"]
)
def test_a_value_of_another_kind_is_named_with_its_key(key: str, value: str) -> None:
    if value == "null" and key == "scaling":
        return
    with pytest.raises(RecipeError, match=key):
        load_recipe("digits", [f"{key}={value}"])


@pytest.mark.parametrize(
    "name", ["../escaped", "a/b", "/tmp/x", "..", ".hidden", "a\\b", "a\x1b[31mb", "a\nb", "a" * 101]
)
def test_a_name_that_is_no_folders_is_refused(name: str) -> None:
    content = {"name": name}
    with pytest.raises(RecipeError, match="name: must"):
        parse_recipe(DIGITS.replace("name: digits", f"name: {content['name']!r}".replace("'", '"')))


@pytest.mark.parametrize("name", recipe_names())
def test_the_estimate_is_near_the_count(name: str) -> None:
    config = load_recipe(name)
    share = estimate_parameters(config) / summarise(config).parameters
    assert 0.4 < share <= 1, "never so large that what fits is refused"
    if config.model.kind == "uvit":
        assert share > 0.97


HUGE = {
    "model.depth=2000000": "model.depth: must be less than or equal to 1024",
    "model.embed_dim=1000000000": "model.embed_dim: must be less than or equal to 65536",
    "diffusion.steps=100000000000": "diffusion.steps: must be less than or equal to 1000000",
    "data.image_size=10000000": "data.image_size: must be less than or equal to 65536",
    "data.workers=1000000": "data.workers: must be less than or equal to 1024",
    "evaluation.images=1000000000000": "evaluation.images: must be less than or equal to",
}
TOO_LARGE = {
    "network": ("model.embed_dim=65536", "model.depth=1024", "model.num_heads=512"),
    "classes": ("labels.classes=1000000000000", "data.label_column=label"),
    "batch": ("training.batch_size=1000000000000",),
}


@pytest.mark.parametrize("override", HUGE)
def test_a_size_that_no_recipe_has_is_refused_with_the_limit(override: str) -> None:
    assert_fails(run("train", "digits", "--dry-run", *sets(override)), HUGE[override])


@pytest.mark.parametrize(
    "command", [["train"], ["compare", "--methods", "none,uniform"], ["edge", "--methods", "none,uniform"]]
)
@pytest.mark.parametrize("what", TOO_LARGE)
def test_what_is_too_large_for_the_memory_is_refused_before_it_is_built(
    command: list[str], what: str, tmp_path
) -> None:
    overrides = [*TOO_LARGE[what], "scaling.method=none"] if command == ["train"] else TOO_LARGE[what]
    result = run(command[0], "digits", *command[1:], *sets(*overrides), "--out", tmp_path / "out", "--dry-run")
    assert_fails(
        result, r"model: about [\d,]+ parameters .* take .* to train, and there are .* of memory here.*--force"
    )
    assert not (tmp_path / "out").exists()


def test_what_seems_too_large_may_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scalelong.config.build.training_memory", lambda sharded: 1_000_000)
    assert_fails(run("train", "digits", "--dry-run"), "take 7.5 MB to train, and there are 1.0 MB of memory here")
    assert run("train", "digits", "--dry-run", "--force").exit_code == 0


def test_weights_that_are_more_than_the_memory_are_never_built(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_recipe("digits", TOO_LARGE["network"])
    with pytest.raises(ValueError, match="model: its weights take .* TB, and this machine has"):
        build_model(config)
    monkeypatch.setattr("scalelong.config.build.training_memory", lambda sharded: 2**63)
    check_memory(config)
