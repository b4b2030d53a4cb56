"""Two processes that hold half of the weights each."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_cases import assert_same_run, final_tensors, in_processes, lasting_metrics, losses

from scalelong.config import RecipeError, load_recipe
from scalelong.runs import Run

PLAIN = ["training.validate_every=4", "optim.warmup_steps=2"]
SHARDED = [*PLAIN, "training.parallel=fsdp"]
MUP = ["model.parametrization=mup", "model.base_width=8"]
CLIPPED = ["optim.adaptive_clip=1.05", "optim.clip_norm=0.1"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`one` process; `two` that share the weights; `killed`, the same with two kills; `parts`, with accumulation.

    `mup one` and `mup two` are in μP, `clipped one` and `clipped two` clip every tensor by itself. `moved` is begun by
    two processes that share the weights and ended by one; in `poisoned` the second meets a NaN.
    """
    folder = tmp_path_factory.mktemp("sharded")
    two = {"processes": 2, "overrides": SHARDED}
    in_processes(
        {"out": folder / "one", "overrides": PLAIN},
        {"out": folder / "two", "processes": 2, "overrides": [*SHARDED, "training.sample_every=8"]},
        {"out": folder / "killed", "kills": 2, "seed": 3, **two},
        {"out": folder / "parts", "processes": 2, "overrides": [*SHARDED, "training.grad_accumulation=2"]},
        {"out": folder / "moved", "processes": 2, "overrides": [*SHARDED, "training.steps=5"]},
        {"out": folder / "moved", "overrides": PLAIN},
        {"out": folder / "clipped one", "overrides": [*PLAIN, *CLIPPED]},
        {"out": folder / "clipped two", "processes": 2, "overrides": [*SHARDED, *CLIPPED]},
        {"out": folder / "mup one", "overrides": [*PLAIN, *MUP]},
        {"out": folder / "mup two", "processes": 2, "overrides": [*SHARDED, *MUP]},
        {"out": folder / "bf16", "processes": 2, "overrides": [*SHARDED, "training.precision=bf16"]},
        {"out": folder / "poisoned", **two, "poisoned_rank": 1},
    )
    return folder


def test_shards_have_the_losses_and_the_samples_of_one_process(runs: Path) -> None:
    one, two = lasting_metrics(runs / "one"), lasting_metrics(runs / "two")
    assert len(one) == len(two) == 10
    for alone, together in zip(one, two, strict=True):
        # 1e-5: sums in another order, over eight steps.
        assert together == pytest.approx(alone, rel=1e-5)
    assert (Run(runs / "two").samples / "step-000008.png").stat().st_size > 100


def test_shards_learn_at_the_rates_of_mup(runs: Path) -> None:
    assert losses(runs / "mup two") == pytest.approx(losses(runs / "mup one"), rel=1e-5)


def test_a_checkpoint_of_shards_holds_whole_tensors(runs: Path) -> None:
    one, two = final_tensors(runs / "one"), final_tensors(runs / "two")
    assert {name: tensor.shape for name, tensor in one.items()} == {name: tensor.shape for name, tensor in two.items()}
    ema = [name for name in one if name.startswith("ema/") and one[name].is_floating_point()]
    # Adam's steps amplify rounding where a gradient is nearly zero.
    assert all(two[name].allclose(one[name], atol=1e-4) for name in ema)


def test_a_sharded_run_killed_twice_ends_as_one_never_killed(runs: Path) -> None:
    assert_same_run(runs / "killed", runs / "two")


def test_accumulated_shards_have_the_losses_of_whole_batches(runs: Path) -> None:
    assert losses(runs / "parts") == pytest.approx(losses(runs / "two"), rel=1e-5)


def test_a_run_saved_in_shards_goes_on_in_one_process(runs: Path) -> None:
    assert losses(runs / "moved") == pytest.approx(losses(runs / "one"), rel=1e-5)


def test_shards_are_clipped_by_the_norms_of_whole_tensors(runs: Path) -> None:
    one, two = (Run(runs / name).checkpoints().latest() for name in ("clipped one", "clipped two"))
    assert one is not None and two is not None
    averages = two.state()["clip"]["norms"]
    assert averages == pytest.approx(one.state()["clip"]["norms"], rel=1e-4) and 0 < max(averages) < 0.1
    assert losses(runs / "clipped two") == pytest.approx(losses(runs / "clipped one"), rel=1e-5)


def test_shards_in_bf16_train_close_to_float32(runs: Path) -> None:
    # bf16 has 8 bits: 2e-2 over eight steps.
    assert losses(runs / "bf16") == pytest.approx(losses(runs / "one"), rel=2e-2)
    assert losses(runs / "bf16") != losses(runs / "two")


def test_all_processes_skip_a_step_that_is_non_finite_in_one_shard(runs: Path) -> None:
    (event,) = [line for line in lasting_metrics(runs / "poisoned") if "event" in line]
    assert (event["event"], event["step"]) == ("skipped", 4)
    assert event["origin"] == "the input of UViT was already non-finite"
    assert all(tensor.isfinite().all() for tensor in final_tensors(runs / "poisoned").values())


def test_shards_in_fp16_are_refused() -> None:
    with pytest.raises(RecipeError, match="training.precision: .*fp32 and bf16, not with fp16"):
        load_recipe("digits", ["training.parallel=fsdp", "training.precision=fp16"])
