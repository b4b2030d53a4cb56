"""Evaluations of a run: the same whatever interrupts them or shares them, and compared only where that is fair."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation_cases import script_file, smooth_images, tiny_network, tiny_run
from torch import Tensor, nn

from scalelong.evaluation import (
    Evaluation,
    FeatureNetwork,
    Figure,
    NotComparable,
    Plan,
    build_reference,
    compare,
    evaluate_network,
    evaluate_run,
    load_features,
    load_reference,
    read_evaluations,
)
from scalelong.evaluation import evaluate as evaluating
from scalelong.evaluation.metrics import frechet_figure, statistics_of
from scalelong.evaluation.results import NAMES
from scalelong.runs import Run
from scalelong.runs.model import load_network
from scalelong.sampling.sample_run import Sampler
from scalelong.utils.runtime import Rank

pytest.importorskip("torchmetrics")

IMAGES = 300


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture(scope="module")
def plan(run: Path) -> Plan:
    """With a network in a file, and the statistics of the run's data."""
    network = f"torchscript:{script_file(run.parent / 'features.pt')}"
    reference = build_reference(Run(run).config().data, load_features(network), folder=run.parent / "statistics")
    return Plan(IMAGES, ("ema",), network, reference)


@pytest.fixture
def fresh(run: Path, tmp_path: Path) -> Path:
    """The same run in a folder where nothing was evaluated yet."""
    for name in ("config.yaml", "checkpoints"):
        (tmp_path / name).symlink_to(run / name)
    return tmp_path


def figures(found: list[Evaluation]) -> dict[str, Figure]:
    (one,) = found
    return one.figures


def count_draws(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first image of each block that is drawn from now on."""
    starts: list[int] = []
    original = evaluating.features_of

    def features_of(sampler: Sampler, network: FeatureNetwork, numbers: range, *rest: Any) -> Tensor:
        starts.append(numbers.start)
        return original(sampler, network, numbers, *rest)

    monkeypatch.setattr(evaluating, "features_of", features_of)
    return starts


def test_an_evaluation_holds_every_figure_with_its_interval_and_every_fact(fresh: Path, plan: Plan) -> None:
    (found,) = evaluate_run(fresh, plan)
    assert list(found.figures) == ["FD-features", "KID-features", "precision", "recall"]
    for figure in found.figures.values():
        assert figure.low is not None and figure.high is not None and figure.low <= figure.value <= figure.high
    assert found.fingerprint.keys() == NAMES.keys()
    assert (found.fingerprint["images"], found.fingerprint["sampler"]) == (IMAGES, "ddim, 2 steps")
    assert (found.fingerprint["network"], found.fingerprint["reference_images"]) == ("features.pt", 297)
    assert (found.step, found.weights) == (3, "ema")
    assert read_evaluations(fresh) == [found]


def test_a_network_in_memory_gets_the_figures_that_its_run_gets(fresh: Path, plan: Plan) -> None:
    config, checkpoint = Run(fresh).config(), Run(fresh).checkpoints().latest()
    assert checkpoint is not None and plan.reference is not None
    (expected,) = evaluate_run(fresh, plan)
    found = evaluate_network(
        load_network(config, checkpoint, "ema"),
        config,
        load_reference(plan.reference),
        network=load_features(plan.network),
        images=IMAGES,
        step=3,
    )
    assert found == expected


def test_an_interrupted_evaluation_goes_on_and_gives_the_same(
    fresh: Path, run: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = figures(evaluate_run(run, plan))
    original = Sampler.sample_batch

    def stop(sampler: Sampler, numbers: range, *rest: Any) -> Tensor:
        if numbers.start >= 256:
            raise KeyboardInterrupt
        return original(sampler, numbers, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "sample_batch", stop)
        with pytest.raises(KeyboardInterrupt):
            evaluate_run(fresh, plan)
    seeds = count_draws(monkeypatch)
    assert figures(evaluate_run(fresh, plan)) == expected
    assert seeds == [256], "the first block was finished"
    assert figures(evaluate_run(fresh, plan)) == expected
    assert seeds == [256], "nothing was left to draw"


def test_a_damaged_block_is_drawn_again(fresh: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = figures(evaluate_run(fresh, plan))
    (block,) = fresh.glob("evaluation/*/block-00000.safetensors")
    damaged = bytearray(block.read_bytes())
    damaged[-1] ^= 1
    block.write_bytes(bytes(damaged))
    seeds = count_draws(monkeypatch)
    assert figures(evaluate_run(fresh, plan)) == expected
    assert seeds == [0]


def test_more_images_add_to_those_that_are_there(fresh: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate_run(fresh, plan)
    seeds = count_draws(monkeypatch)
    evaluate_run(fresh, replace(plan, images=520))
    assert seeds == [256, 512]
    evaluate_run(fresh, plan)
    evaluate_run(fresh, replace(plan, images=520))
    assert seeds == [256, 512], "a smaller evaluation in between forgets nothing"


def test_other_samplers_seeds_and_weights_have_blocks_of_their_own(fresh: Path, plan: Plan) -> None:
    small = replace(plan, images=40)
    others = [small, replace(small, seed=7), replace(small, sampling={"steps": 3}), replace(small, weights=("raw",))]
    values = {figures(evaluate_run(fresh, other))["FD-features"].value for other in others}
    assert len(values) == len(others)
    assert len(list(fresh.glob("evaluation/step-000003-*"))) == len(others)


def test_images_of_compiled_code_have_blocks_of_their_own(
    fresh: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda network, **options: compiled.append(network))
    plain, _, again = (evaluate_run(fresh, replace(plan, images=40, compile=flag)) for flag in (False, True, True))
    # The second time nothing is left to draw.
    assert len(compiled) == 1
    assert len(list(fresh.glob("evaluation/step-000003-*"))) == 2
    assert read_evaluations(fresh) == [*plain, *again]
    with pytest.raises(NotComparable, match="the sampler is 'ddim, 2 steps' and 'ddim, 2 steps, compiled'"):
        compare(*plain, *again)


def test_two_processes_give_what_one_gives(fresh: Path, run: Path, plan: Plan) -> None:
    expected = figures(evaluate_run(run, plan))
    assert evaluate_run(fresh, plan, rank=Rank(1, 2)) == []
    assert figures(evaluate_run(fresh, plan, rank=Rank(0, 2))) == expected


def test_an_evaluation_tells_how_many_images_are_read_described_and_drawn(
    fresh: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: dict[str, list[float]] = {}
    evaluate_run(
        fresh,
        replace(plan, images=64, reference=None),
        progress=lambda what, done, count: seen.setdefault(what, []).append(done / count),
    )
    assert list(seen) == ["images of the dataset read", "images of the dataset described", "images sampled"]
    assert all(shares == sorted(shares) and shares[-1] == 1 for shares in seen.values())
    assert 0.5 in seen["images sampled"], "after the first of two steps"


def test_statistics_are_built_once_and_found_by_content(
    run: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    network, data = load_features(plan.network), Run(run).config().data
    assert plan.reference is not None
    calls: list[int] = []
    counted = replace(network, forward=lambda images: calls.append(len(images)) or network.forward(images))
    again = build_reference(data, counted, folder=plan.reference.parent)
    assert again == plan.reference and calls == []
    other = build_reference(data, counted, folder=plan.reference.parent, images=50)
    assert other is not None and other != plan.reference and len(calls) == 2
    assert load_reference(other).statistics.count == 50
    assert not list(plan.reference.parent.glob("*.blocks"))
    with pytest.raises(ValueError, match="there are 297 images .* 2 to 297"):
        build_reference(data, network, folder=tmp_path, images=298)


def test_commands_that_want_the_same_statistics_at_once_make_them_once(run: Path, plan: Plan, tmp_path: Path) -> None:
    network, calls, found = load_features(plan.network), [], []
    counted = replace(network, forward=lambda images: calls.append(len(images)) or network.forward(images))
    build = lambda: found.append(build_reference(Run(run).config().data, counted, folder=tmp_path))  # noqa: E731
    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and len(set(found)) == 1
    assert len(calls) == 10, "297 images, 32 at once"


def test_evaluations_of_other_seeds_are_kept_beside_each_other_and_may_be_compared(fresh: Path, plan: Plan) -> None:
    small = replace(plan, images=40)
    (first,), (second,) = evaluate_run(fresh, small), evaluate_run(fresh, replace(small, seed=7))
    assert (first.seed, second.seed) == (0, 7)
    assert read_evaluations(fresh) == [first, second]
    assert compare(first, second)["FD-features"] != 0


def test_what_cannot_be_compared_is_refused_before_an_image_is_drawn(
    fresh: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    (other,) = evaluate_run(fresh, replace(plan, images=40))
    starts = count_draws(monkeypatch)
    with pytest.raises(NotComparable, match="the number of images is 40 and 50"):
        evaluate_run(fresh, replace(plan, images=50), others=[other])
    assert starts == []


def test_a_missing_library_is_named_before_an_image_is_drawn(
    fresh: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = count_draws(monkeypatch)
    monkeypatch.setitem(sys.modules, "torchmetrics.image.kid", None)
    with pytest.raises(ImportError, match=r'the KID needs torchmetrics: pip install "scalelong\[eval\]"'):
        evaluate_run(fresh, plan)
    assert starts == []


def test_the_checkpoint_of_a_step_can_be_evaluated(fresh: Path, plan: Plan) -> None:
    (found,) = evaluate_run(fresh, replace(plan, images=40, checkpoint=0))
    assert found.step == 0
    assert [path.name[:15] for path in (fresh / "evaluation").iterdir()] == ["step-000000-ema"]


def damaged(kind: str) -> list[Callable[[Tensor], Tensor]]:
    def noisy(level: float) -> Callable[[Tensor], Tensor]:
        noise = torch.randn(400, 3, 16, 16, generator=torch.Generator().manual_seed(3))
        return lambda images: (images + level * noise).round().clamp(0, 255).byte()

    def blurred(radius: int) -> Callable[[Tensor], Tensor]:
        def blur(images: Tensor) -> Tensor:
            padded = torch.nn.functional.pad(images.float(), (radius,) * 4, mode="reflect")
            return torch.nn.functional.avg_pool2d(padded, 2 * radius + 1, stride=1).round().byte()

        return blur

    return [noisy(level) for level in (24, 48, 96)] if kind == "noise" else [blurred(side) for side in (1, 2, 4)]


@pytest.mark.parametrize("kind", ["noise", "blur"])
def test_the_distance_rises_strictly_with_damage_from_the_floor_of_two_halves(kind: str) -> None:
    network, images = tiny_network(), smooth_images(400, 1)
    reference = statistics_of(network(smooth_images(400, 0)))
    found = [frechet_figure(reference, network(damage(images))) for damage in [lambda same: same, *damaged(kind)]]
    values = [figure.value for figure in found]
    assert values == sorted(values) and len(set(values)) == len(values)
    floor, first = found[0], found[1]
    assert floor.high is not None and first.low is not None and first.low > floor.high


def test_training_lowers_the_distance(tmp_path: Path, plan: Plan) -> None:
    longer = tiny_run(tmp_path / "longer", *("training.steps=150", "training.batch_size=32", "optim.ema_decay=0.95"))
    sampled = replace(plan, images=256, sampling={"steps": 10})
    (after,) = evaluate_run(longer, sampled)
    start = tiny_run(tmp_path / "start")
    (before,) = evaluate_run(start, sampled)
    difference = compare(before, after)["FD-features"]
    width = max((one.figures["FD-features"].error or 0.0) for one in (before, after))
    assert difference < -5 * width
