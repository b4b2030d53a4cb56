"""What is compared, and what is refused before anything is run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from comparison_cases import tiny_plan

from scalelong.compare.grid import FILE, PlanError, check_plan, make_plan, save_plan
from scalelong.config import RecipeError
from scalelong.runs import RunError
from scalelong.skips import METHODS
from scalelong.utils.atomic import read_json, write_signed
from scalelong.utils.records import flatten


def test_the_arms_of_a_setting_differ_in_the_scaling_only() -> None:
    plan = tiny_plan(*METHODS)
    base, *others = [flatten(arm.config.model_dump(mode="json")) for arm in plan.arms]
    for other in others:
        assert {key for key in base if base[key] != other[key]} <= {key for key in base if key.startswith("scaling.")}
    assert [arm.config.scaling.method for arm in plan.arms] == list(METHODS)


def test_every_method_meets_every_rate_depth_and_batch_size_with_every_seed() -> None:
    plan = tiny_plan("none", "ls", seeds=3, rates=[1e-3, 2e-3], depths=[2, 4], batches=[4, 8])
    assert len(plan.arms) == 2 * 2 * 2 * 2
    assert len({(arm.method.name, *arm.axes.values()) for arm in plan.arms}) == len(plan.arms)
    assert len({run.folder for run in plan.runs}) == len(plan.runs) == 3 * len(plan.arms)
    assert all(base.setting == arm.setting and base.method.name == "none" for arm, base in plan.pairs())
    assert len(list(plan.pairs())) == len(plan.arms) // 2


def test_seeds_count_from_the_recipes_own() -> None:
    plan = tiny_plan(seeds=3, more=("seed=7",))
    assert plan.seeds == (7, 8, 9)
    assert {(run.seed, run.config.seed, run.folder.name) for run in plan.runs} == {
        (seed, seed, f"seed-{seed}") for seed in (7, 8, 9)
    }


def test_no_arm_is_always_the_first_of_its_seed() -> None:
    plan = tiny_plan("none", "cs", "ls", seeds=3)
    firsts = [run.arm.id for run in plan.runs][::3]
    assert sorted(firsts) == ["cs", "ls", "none"]


def test_a_method_carries_its_options_into_its_config_id_and_label() -> None:
    plan = tiny_plan("none", "cs", "cs:kappa=0.5", "uniform", "ls:ratio=4:activation=elu")
    assert [(arm.id, arm.label) for arm in plan.arms] == [
        ("none", "none"),
        ("cs", "CS κ=0.7"),
        ("cs-kappa0.5", "CS κ=0.5"),
        ("uniform", "uniform 1/√2"),
        ("ls-ratio4-activationelu", "LS ratio 4 activation elu"),
    ]
    assert plan.arms[2].config.scaling.kappa == 0.5
    assert plan.arms[4].config.scaling.options == {"ratio": 4, "activation": "elu"}


def test_methods_with_learning_rates_of_their_own_are_compared_with_each_other() -> None:
    plan = tiny_plan("none:lr=8e-3", "cs:kappa=0.5:lr=1.6e-2")
    assert [(arm.id, arm.label, arm.config.optim.lr) for arm in plan.arms] == [
        ("none-lr0.008", "none at 0.008", 0.008),
        ("cs-kappa0.5-lr0.016", "CS κ=0.5 at 0.016", 0.016),
    ]
    assert plan.arms[1].config.scaling.options == {"kappa": 0.5}
    assert [(arm.id, base.id) for arm, base in plan.pairs()] == [("cs-kappa0.5-lr0.016", "none-lr0.008")]
    assert plan.arms[0].setting.startswith("each at its own lr, ")


def test_scaling_before_and_after_the_norm_can_be_told_apart() -> None:
    before, after = make_plan("digits", ["cs", "cs:where=after-norm"]).arms
    assert (before.label, after.label) == ("CS κ=0.7", "CS κ=0.7 after-norm")
    assert after.options == {"kappa": 0.7, "where": "after-norm"}


def test_an_arms_id_is_a_safe_name_of_one_folder() -> None:
    for arm in tiny_plan("none", "learnable : init = -0.5", rates=[1e-5, 2e-5]).arms:
        assert re.fullmatch(r"(none|learnable-init-0\.5)-lr[12]e-05", arm.id)


def test_the_baseline_is_none_or_else_the_first_method() -> None:
    assert tiny_plan("cs", "none").baseline.name == "none"
    assert tiny_plan("cs", "ls").baseline.name == "cs"


@pytest.mark.parametrize(("steps", "every"), [(3200, 160), (40, 2), (10, 1)])
def test_curves_have_at_least_twenty_points_where_the_steps_allow(steps: int, every: int) -> None:
    training = tiny_plan(more=(f"training.steps={steps}",)).arms[0].config.training
    assert training.validate_every == every
    assert training.checkpoint_every <= max(1, steps // 10)


def test_a_recipe_that_evaluates_more_often_and_a_user_who_sets_an_interval_are_heeded() -> None:
    finer = tiny_plan(more=("training.steps=4000", "training.validate_every=50")).arms[0].config.training
    assert (finer.validate_every, finer.monitor_every) == (50, 40)
    chosen = tiny_plan(more=("training.steps=1000", "training.validate_every=100", "training.monitor_every=7"))
    assert (chosen.arms[0].config.training.validate_every, chosen.arms[0].config.training.monitor_every) == (100, 7)


@pytest.mark.parametrize(
    ("methods", "options", "message"),
    [
        (["none", "unifrom"], {}, "no method 'unifrom'; did you mean 'uniform'"),
        (["none", "cs:kappa"], {}, "write options as cs:option=value"),
        (["cs", "cs"], {}, "'cs' twice"),
        (["none:lr=8e-3", "cs"], {}, "none-lr0.008 a learning rate of its own: give every method one"),
        (["none:lr=8e-3"], {"rates": [1e-3, 2e-3]}, "and no --lr"),
        (["cs:lr=fast"], {}, "write one learning rate as cs:lr=8e-3"),
        (["cs", "cs:kappa=0.7"], {}, "cs and cs-kappa0.7 are the same method"),
        ([], {}, "no methods to compare"),
        (["none"], {"seeds": 0}, "at least one seed, got 0"),
        (["none"], {"rates": [1e-3, 1e-3]}, "--lr has a value twice: 0.001, 0.001"),
        (["none"], {"overrides": ["training.steps=4"]}, "leaves 4 points on a curve of 4 steps"),
        (["none"], {"overrides": ["training.validate_every=1000"]}, "training.validate_every=1000 leaves 4 points"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_reason(methods: list[str], options: dict, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        make_plan("digits", methods, **options)


@pytest.mark.parametrize(
    ("method", "message"), [("cs:kappa=2", "scaling.kappa: must be less than or equal to 1"), ("cs:ratio=4", "ratio")]
)
def test_an_option_that_the_method_does_not_take_is_an_error_of_the_recipe(method: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make_plan("digits", [method])


def test_a_comparison_may_be_gone_on_with_and_extended(tmp_path: Path) -> None:
    save_plan(tmp_path / "out", tiny_plan("none", "cs", seeds=2), "first")
    check_plan(tmp_path / "out", tiny_plan("none", "cs", seeds=2))
    check_plan(tmp_path / "out", tiny_plan("none", "cs", "ls", seeds=5))


def test_keys_that_are_newer_than_the_folder_have_their_defaults(tmp_path: Path) -> None:
    save_plan(tmp_path, tiny_plan("none", "cs"), "first")
    content = read_json(tmp_path / FILE)
    for arm in content["arms"]:
        del arm["config"]["optim"]["schedule"]
    write_signed(tmp_path / FILE, content)
    check_plan(tmp_path, tiny_plan("none", "cs"))
    with pytest.raises(PlanError, match="optim.schedule constant → cosine"):
        check_plan(tmp_path, tiny_plan("none", "cs", more=("optim.schedule=cosine",)))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (tiny_plan("none", "ls"), "holds a comparison with cs, which is not asked for now"),
        (tiny_plan("none", "cs", seeds=1), "holds a comparison with 2 seeds, now 1"),
        (tiny_plan("none", "cs", more=("training.steps=20",)), "training.steps 10 → 20"),
        (tiny_plan("none", "cs", more=("optim.lr=0.5",)), "optim.lr 0.004 → 0.5"),
    ],
)
def test_another_comparison_in_the_folder_is_refused(tmp_path: Path, other: object, message: str) -> None:
    save_plan(tmp_path, tiny_plan("none", "cs"), "first")
    with pytest.raises(PlanError, match=re.escape(message)):
        check_plan(tmp_path, other)  # type: ignore[arg-type]


@pytest.mark.parametrize(("file", "message"), [("thesis.tex", "holds other files"), ("config.yaml", "a single run")])
def test_a_folder_with_other_files_is_refused(file: str, message: str, tmp_path: Path) -> None:
    (tmp_path / file).touch()
    with pytest.raises((RunError, PlanError), match=message):
        check_plan(tmp_path, tiny_plan())
