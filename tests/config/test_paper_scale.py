"""docs/paper-scale.md: what the paper's settings cost, as counted and estimated by docs/make_paper_scale.py."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from scalelong.config import load_recipe

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "paper-scale.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    pytest.importorskip("diffusers")
    sys.path.append(str(DOCS))
    import make_paper_scale

    return make_paper_scale


def test_the_table_is_that_of_the_script(script: ModuleType) -> None:
    assert script.table() in PAGE


def test_the_operations_of_a_uvit_are_those_of_its_arithmetic(script: ModuleType) -> None:
    tokens, dim, blocks, skips = 257, 512, 13, 6
    # Products for a token: 12·D² in a block and L·D for scores and as much for values; 2·D² where a skip is joined.
    products = tokens * (blocks * (12 * dim**2 + 2 * tokens * dim) + skips * 2 * dim**2)
    # A product is a multiplication and an addition; the backward pass has two for each. 1 %: patches in and out.
    assert script.measure(load_recipe("cifar10-uvit-s2")).flops == pytest.approx(3 * 2 * products, rel=0.01)


def test_what_is_kept_for_the_backward_pass_grows_with_the_depth_and_leaves_out_the_weights(script: ModuleType) -> None:
    shallow, deep = (script.measure(load_recipe("cifar10-uvit-s2", [f"model.depth={depth}"])) for depth in (6, 12))
    assert deep.kept == pytest.approx(13 / 7 * shallow.kept, rel=0.05)
    wide = script.measure(load_recipe("cifar10-uvit-s2", ["model.depth=6", "model.img_size=8", "data.image_size=8"]))
    assert wide.parameters > 0.95 * shallow.parameters and wide.kept < 0.06 * shallow.kept


def test_the_papers_own_hours_are_as_the_page_says(script: ModuleType) -> None:
    config = load_recipe("cifar10-uvit-s2")
    rate = script.measure(config).flops * 32 * config.training.steps / (15.6 * 3600)
    assert f"{rate / 1e12:.0f} TFLOP/s" in PAGE and script.RATE / rate == pytest.approx(4.5, abs=0.1)
