"""Facts of a result: what differs in one is not compared, and results are kept by them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from evaluation_cases import gaussians, reference_of, tiny_network

from scalelong.config import load_recipe
from scalelong.evaluation import Evaluation, Figure, NotComparable, Reference, compare, read_evaluations
from scalelong.evaluation.metrics import statistics_of
from scalelong.evaluation.results import NAMES, check_reference, counterpart, record, result_fingerprint

FACTS = {
    "network": "inception",
    "weights": "6726825d",
    "resize": "bilinear to 299 px",
    "images": 50_000,
    "sampler": "ddim, 50 steps",
    "precision": "fp32",
    "captions": None,
    "reference": "abc",
    "reference_images": 50_000,
}


def evaluation(**changed: object) -> Evaluation:
    return Evaluation({**FACTS, **changed}, {"FID": Figure(3.0)}, 0, "ema")  # type: ignore[dict-item]


@pytest.mark.parametrize(("key", "value"), [(key, f"other {key}") for key in FACTS])
def test_figures_that_differ_in_a_fact_refuse_to_be_compared_and_name_it(key: str, value: str) -> None:
    with pytest.raises(NotComparable, match=f"the {NAMES[key]} is .* and '{value}'"):
        compare(evaluation(), evaluation(**{key: value}))


def test_figures_with_equal_facts_are_subtracted() -> None:
    better = replace(evaluation(), figures={"FID": Figure(2.5), "KID": Figure(0.1)}, step=10)
    assert compare(evaluation(), better) == {"FID": -0.5}


def test_the_latest_comparable_evaluation_of_the_same_weights_is_the_counterpart() -> None:
    one, other, raw = evaluation(), evaluation(images=100), replace(evaluation(), weights="raw")
    early, late = replace(one, step=1), replace(one, step=2)
    assert counterpart(one.fingerprint, "ema", [early, late, raw, other]) == late
    assert counterpart(one.fingerprint, "ema", [early, raw, other][1:]) == raw
    assert counterpart(one.fingerprint, "ema", [other]) == other


def test_a_reference_of_another_network_is_refused() -> None:
    network = tiny_network()
    reference = reference_of(gaussians(20, 16, 0), network)
    check_reference(reference, network)
    with pytest.raises(NotComparable, match="reference's weights is 'weights-0', and the evaluation's is 'weights-1'"):
        check_reference(reference, tiny_network(seed=1))
    with pytest.raises(NotComparable, match="taken for pytorch-fid's, whose network is 'inception' with the released"):
        check_reference(Reference(reference.statistics, {}), network)


def test_a_reference_of_pytorch_fid_goes_with_the_released_weights_only() -> None:
    unsaid = Reference(statistics_of(gaussians(20, 16, 0)), {})
    inception = replace(tiny_network("inception"), distance="FID")
    check_reference(unsaid, inception)
    with pytest.raises(
        NotComparable, match="does not say .* the evaluation's is 'inception' with the weights weights-0"
    ):
        check_reference(unsaid, replace(inception, distance="FD-Inception"))


def test_images_of_captions_say_how_many_different_ones_there_were() -> None:
    config, network = load_recipe("flickr-tiny", ["data.validation_count=30"]), tiny_network()
    reference = reference_of(gaussians(20, 16, 0), network)
    assert [result_fingerprint(config, network, reference, images)["captions"] for images in (20, 40)] == [20, 30]


def test_later_evaluations_replace_those_of_the_same_facts_and_keep_the_others(tmp_path: Path) -> None:
    first, other = evaluation(), evaluation(images=100)
    record(tmp_path, [first])
    record(tmp_path, [other])
    again = replace(first, figures={"FID": Figure(2.0, 0.1, 1.8, 2.2)})
    record(tmp_path, [again])
    assert read_evaluations(tmp_path) == [other, again]
    file = tmp_path / "evaluation.json"
    file.write_text(file.read_text().replace("1.8", "1.9"))
    with pytest.raises(ValueError, match="evaluation.json does not hold evaluations .an entry does not match"):
        read_evaluations(tmp_path)
    with pytest.raises(ValueError, match="there is no .*: scalelong evaluate writes it"):
        read_evaluations(tmp_path / "elsewhere.json")
