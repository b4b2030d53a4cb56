"""The models and the oracle are right about each other, so that other tests may trust them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from .family import Family, Inputs, cases
from .oracle import Joined, disagreements, record_joins, skips_seen
from .zoo import FAMILIES, NOT_UNETS, UNKNOWN


class Case(NamedTuple):
    family: Family
    model: nn.Module
    inputs: Inputs
    output: Tensor
    joins: list[Joined]


@pytest.fixture(scope="module", params=cases([*FAMILIES, *UNKNOWN]), ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    family = request.param
    model, inputs = family.tiny()
    with torch.no_grad():
        output = family.run(model, inputs)
    return Case(family, model, inputs, output, family.joins(model, inputs))


def test_the_declared_widths_are_those_of_the_skips_that_are_joined(case: Case) -> None:
    assert tuple(joined.skip.shape[1] for joined in reversed(case.joins)) == case.family.widths


def test_skips_are_joined_in_the_reverse_of_the_order_they_were_made_in(case: Case) -> None:
    if case.family.name == "lateral":
        pytest.skip("its inner skip is made by a convolution at the moment it is joined")
    made = [joined.born[joined.skip_at] for joined in case.joins]
    assert made == sorted(made, reverse=True)
    assert len(set(made)) == len(made)
    assert all(made_at < joined.born[1 - joined.skip_at] for made_at, joined in zip(made, case.joins, strict=True))


def test_a_norm_reads_the_joined_features_exactly_where_declared(case: Case) -> None:
    modules = dict(case.model.named_modules())
    for joined in case.joins:
        kinds = [type(modules[path]).__name__.lower() for path in joined.readers]
        assert any("norm" in kind or kind == "adagn" for kind in kinds) == case.family.absorbed


def test_the_output_depends_on_every_skip(case: Case) -> None:
    for lost in range(case.family.num_skips):
        coefficients = [0.0 if index == lost else 1.0 for index in range(case.family.num_skips)]
        assert not torch.equal(case.family.run_scaled(case.model, case.inputs, coefficients), case.output)


def test_scaling_every_skip_by_one_changes_nothing(case: Case) -> None:
    ones = [1.0] * case.family.num_skips
    assert torch.equal(case.family.run_scaled(case.model, case.inputs, ones), case.output)


def test_watching_leaves_the_model_as_it_was(case: Case) -> None:
    with torch.no_grad():
        assert torch.equal(case.family.run(case.model, case.inputs), case.output)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in case.model.modules())


def test_a_tiny_model_is_the_same_every_time_and_leaves_the_generator_alone(case: Case) -> None:
    before = torch.get_rng_state()
    model, inputs = case.family.tiny()
    with torch.no_grad():
        assert torch.equal(case.family.run(model, inputs), case.output)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("family", NOT_UNETS, ids=str)
def test_networks_without_skips_run(family: Family) -> None:
    model, inputs = family.tiny()
    assert family.run(model, inputs).isfinite().all()


def site(index: int, consumer: str, start: int, width: int) -> SimpleNamespace:
    entry = SimpleNamespace(start=start, stop=start + width, dim=1)
    return SimpleNamespace(index=index, consumer=consumer, entry=entry, width=width)


INLINE = [site(1, "up1", 8, 8), site(2, "up2", 16, 16), site(3, "up3", 24, 24)]


@pytest.mark.parametrize(
    ("sites", "complaint"),
    [
        (INLINE, None),
        (INLINE[:2], "2 sites were found, 3 long skips were joined"),
        (INLINE[::-1], "do not run from 1"),
        ([site(1, "up1", 0, 8), *INLINE[1:]], "site 1 at up1"),
        ([INLINE[0], site(2, "up3", 24, 24), site(3, "up2", 16, 16)], "site 2 at up3"),
        ([INLINE[0], site(2, "up2", 16, 12), INLINE[2]], "site 2 at up2"),
    ],
    ids=["right", "one-missing", "backwards", "trunk-for-skip", "swapped", "too-narrow"],
)
def test_the_oracle_finds_the_mistake_in_sites(sites: list[SimpleNamespace], complaint: str | None) -> None:
    family = next(family for family in UNKNOWN if family.name == "inline-cat")
    model, inputs = family.tiny()
    seen = skips_seen(model, sites, inputs, family.run)
    wrong = disagreements(sites, seen, family.joins(model, inputs))
    assert wrong == [] if complaint is None else complaint in wrong[0]


def test_the_oracle_reads_arguments_by_position_by_name_and_by_item() -> None:
    tokens, listed = (next(family for family in UNKNOWN if family.name == name) for name in ("tokens", "list-of-skips"))
    for family, consumers, entries in [
        (tokens, ["late.2", "late.1", "late.0"], [SimpleNamespace(position=1, name="residual", item=None)] * 3),
        (listed, ["decoder"] * 2, [SimpleNamespace(position=1, name=None, item=item) for item in (-2, -1)]),
    ]:
        model, inputs = family.tiny()
        sites = [
            SimpleNamespace(index=index, consumer=consumer, entry=entry, width=width)
            for index, (consumer, entry, width) in enumerate(zip(consumers, entries, family.widths, strict=True), 1)
        ]
        seen = skips_seen(model, sites, inputs, family.run)
        assert disagreements(sites, seen, family.joins(model, inputs)) == []


def test_without_a_declaration_every_join_is_recorded() -> None:
    family = next(family for family in UNKNOWN if family.name == "tokens")
    model, inputs = family.tiny()
    joins = record_joins(model, inputs, family.run)
    assert [joined.path for joined in joins if joined.op == "cat"] == ["", "late.0", "late.1", "late.2"]
