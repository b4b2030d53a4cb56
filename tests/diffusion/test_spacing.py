"""Which times a sampler visits, those of diffusers under the same name, and what spacing and clipping change."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from typing import Any, get_args

import diffusers
import pytest
import torch
from exact_moments import bias
from exact_scores import build, gaussian_predictor, seeded_noise
from hypothesis import given
from hypothesis import strategies as st
from test_samplers import plain_loop

from scalelong.diffusion import SAMPLERS, sample
from scalelong.diffusion.samplers import SPACINGS, Route, Spacing, build_solver, solver_indices

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs"))

import make_sampler_table as table

EVEN = ("linspace", "leading", "trailing")
RANDOM = ("ddpm", "dpm-solver++-sde")
AS_DPM = ("dpm-solver++", "dpm-solver++-sde", "unipc")

spacings = pytest.mark.parametrize("spacing", SPACINGS)
samplers = pytest.mark.parametrize("sampler", SAMPLERS)


# The times


def test_every_spacing_has_its_name() -> None:
    assert tuple(SPACINGS) == get_args(Spacing)


@spacings
@given(steps=st.integers(1, 200), kind=st.sampled_from([("linear", "discrete"), ("cosine", "continuous")]))
def test_times_fall_without_repeats_and_an_open_end_leaves_the_cleanest_out(spacing, steps: int, kind) -> None:
    process = build(kind, num_steps=201)
    for open_end in (False, True):
        indices = solver_indices(process, steps, spacing, open_end=open_end)
        assert len(set(indices)) == steps and indices == sorted(indices, reverse=True)
        assert indices[-1] >= 0 and indices[0] < 201
        assert not open_end or indices[-1] > 0


@spacings
def test_more_steps_than_there_are_times_are_refused(spacing) -> None:
    with pytest.raises(ValueError, match="steps must be between 1 and 1000, the schedule's number of times, got 1001"):
        solver_indices(build(), 1001, spacing)


@spacings
@samplers
def test_every_sampler_takes_as_many_steps_as_there_are_times_and_no_more(spacing: Spacing, sampler: str) -> None:
    process = build(num_steps=20)
    cleanest_is_left_out = "-3" in sampler or (spacing in EVEN[:2] and sampler in AS_DPM)
    most = 20 - cleanest_is_left_out
    visited = build_solver(process, sampler, Route(most, spacing, "small")).times.tolist()
    assert sorted(set(visited)) == list(range(cleanest_is_left_out, 20))
    with pytest.raises(ValueError, match=f"steps must be between 1 and {most}, the schedule's number of times"):
        build_solver(process, sampler, Route(most + 1, spacing, "small"))


def test_an_unknown_spacing_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="no spacing 'even'; known: quadratic, linspace"):
        sample(gaussian_predictor(build()), build(), (1, 4, 4), seeds=[0], timestep_spacing="even")  # type: ignore[arg-type]


def test_log_snr_is_even_but_for_the_rounding_to_whole_times() -> None:
    process = build()
    known = torch.logit(process.schedule.alphas_cumprod.double())
    even = torch.linspace(known[999].item(), known[0].item(), 20, dtype=torch.float64)
    nearest = (known - even.unsqueeze(1)).abs().argmin(1)
    assert solver_indices(process, 20, "logsnr") == nearest.tolist()


# diffusers

SINGLE = {"solver_order": 3, "final_sigmas_type": "sigma_min", "lower_order_final": True}
# The scheduler, its options, our sampler and its options. With 28 steps Heun's `linspace` has whole times.
THEIRS: dict[str, tuple[Any, dict[str, Any], str, dict[str, Any], int]] = {
    "ddim": (diffusers.DDIMScheduler, {"clip_sample": False}, "ddim", {}, 25),
    "ddim, clipped": (diffusers.DDIMScheduler, {"clip_sample": True}, "ddim", {"clip": True}, 25),
    "ddpm": (diffusers.DDPMScheduler, {"clip_sample": False}, "ddpm", {}, 28),
    "ddpm, large": (
        diffusers.DDPMScheduler,
        {"clip_sample": False, "variance_type": "fixed_large"},
        "ddpm",
        {"variance": "large"},
        28,
    ),
    "dpm-solver++": (diffusers.DPMSolverMultistepScheduler, {}, "dpm-solver++", {}, 28),
    "dpm-solver++-sde": (
        diffusers.DPMSolverMultistepScheduler,
        {"algorithm_type": "sde-dpmsolver++"},
        "dpm-solver++-sde",
        {},
        28,
    ),
    "heun": (diffusers.HeunDiscreteScheduler, {}, "heun", {}, 28),
    "unipc": (diffusers.UniPCMultistepScheduler, {}, "unipc", {}, 28),
}


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("spacing", EVEN)
@pytest.mark.parametrize("name", THEIRS)
def test_the_same_name_and_steps_give_the_times_and_the_image_of_diffusers(name: str, spacing: Spacing) -> None:
    kind, options, sampler, ours, steps = THEIRS[name]
    # DDIMScheduler steps back by num_steps // steps: with "linspace" that is its next time only if it visits all.
    process = build(num_steps=steps if (sampler, spacing) == ("ddim", "linspace") else 1000)
    scheduler = kind(process.schedule.num_steps, beta_start=1e-4, beta_end=0.02, timestep_spacing=spacing, **options)
    scheduler.set_timesteps(steps)
    solver = build_solver(process, sampler, Route(steps, spacing, "small"))
    assert [int(t) for t in scheduler.timesteps] == solver.times.tolist()
    generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
    noise = torch.stack([torch.randn(1, 8, 8, generator=generator) for generator in generators])
    # Most of N(0.3, 0.8²) lies within [−1, 1], and enough without.
    predict = gaussian_predictor(process, 0.8)
    given = {"generator": generators} if sampler in RANDOM else {}
    given |= {"use_clipped_model_output": True} if ours.get("clip") else {}
    expected = plain_loop(scheduler, predict, noise, given.pop("generator", None), **given)
    images = sample(predict, process, (1, 8, 8), seeds=range(3), steps=steps, sampler=sampler, timestep_spacing=spacing,
                    **{"clip": False, **ours})  # fmt: skip
    torch.testing.assert_close(images, expected, atol=1e-3, rtol=0)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*dpmsolver. is deprecated:FutureWarning")
@pytest.mark.parametrize("steps", [147, 148, 149])
@pytest.mark.parametrize("spacing", ["linspace", "quadratic", "logsnr"])
@pytest.mark.parametrize(("sampler", "algorithm"), [("dpm-solver-3", "dpmsolver"), ("dpm-solver++-3", "dpmsolver++")])
def test_single_steps_of_third_order_are_those_of_diffusers_at_the_same_times(
    sampler: str, algorithm: str, spacing: Spacing, steps: int
) -> None:
    process, noise = build(), seeded_noise(range(3), 1, 8, 8)
    solver = build_solver(process, sampler, Route(steps, spacing, "small"))
    scheduler = diffusers.DPMSolverSinglestepScheduler(
        beta_start=1e-4, beta_end=0.02, algorithm_type=algorithm, **SINGLE
    )
    scheduler.set_timesteps(steps)
    if (sampler, spacing) == ("dpm-solver++-3", "linspace"):
        assert scheduler.timesteps.tolist() == solver.times.tolist()
    scheduler.set_timesteps(timesteps=solver.times.tolist())
    expected = plain_loop(scheduler, gaussian_predictor(process, 0.5), noise)
    images = sample(
        gaussian_predictor(process, 0.5), process, noise, seeds=range(3), steps=steps, sampler=sampler,
        timestep_spacing=spacing, clip=False,
    )  # fmt: skip
    # diffusers goes to the last node of a step by another formula of the same order.
    torch.testing.assert_close(images, expected, atol=1e-3, rtol=0)


# How exact they are


PAGE = (table.DOCS / "samplers.md").read_text(encoding="utf-8")


def stated(name: str) -> dict[str, list[str]]:
    """The cells of a table of docs/samplers.md by sampler."""
    found = re.search(rf"<!-- {name} -->(.*?)<!-- end -->", PAGE, flags=re.DOTALL)
    assert found is not None
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in found[1].strip().splitlines()]
    assert rows[0][1:] == list(table.ERROR_SPACINGS if name == "errors" else SPACINGS)
    return {row[0].strip("`"): row[1:] for row in rows[2:]}


@pytest.mark.parametrize(("name", "std"), [("wide", 0.5), ("narrow", 0.2)])
def test_the_variance_of_every_sampler_and_spacing_misses_what_the_page_says(name: str, std: float) -> None:
    cells, process = stated(name), build()
    assert cells.keys() == {*SAMPLERS, "ddpm --variance large"}
    for label, row in cells.items():
        sampler, _, variance = label.partition(" --variance ")
        for spacing, cell in zip(SPACINGS, row, strict=True):
            found = bias(process, sampler, 50, std, timestep_spacing=spacing, variance=variance or "small")
            percents = float(cell.removesuffix(" %").replace("−", "-"))
            assert 100 * found == pytest.approx(percents, abs=0.06), f"{label}, {spacing}"


@samplers
@spacings
def test_clipping_changes_no_bit_where_no_estimate_leaves_the_range(spacing: Spacing, sampler: str) -> None:
    process = build()
    # The range ends fourteen deviations from the mean.
    predict, noise = gaussian_predictor(process, 0.05), seeded_noise(range(2), 1, 8, 8)
    given = {"seeds": range(2), "steps": 20, "sampler": sampler, "timestep_spacing": spacing}
    assert torch.equal(*(sample(predict, process, noise, clip=clip, **given) for clip in (True, False)))


@pytest.mark.parametrize("sampler", ["dpm-solver-3", "dpm-solver++-3"])
def test_twice_the_steps_divide_the_error_of_third_order_by_eight(sampler: str) -> None:
    # Steps that are even in log-SNR, from 23 to 95 evaluations, all of which end with a step of second order.
    errors = [table.error(sampler, "logsnr", steps) for steps in (23, 47, 95)]
    assert all(coarse / fine > 0.95 * 2**3 for coarse, fine in itertools.pairwise(errors)), errors


# The error of the 2M SDE changes its sign on the way where times are even; the tables have its size.
FALLING = [
    pair for pair in itertools.product(SAMPLERS, SPACINGS) if pair[0] != "dpm-solver++-sde" or pair[1] not in EVEN
]


@pytest.mark.parametrize(("sampler", "spacing"), FALLING)
def test_four_times_the_steps_at_least_halve_the_error(sampler: str, spacing: Spacing) -> None:
    few, many = (table.error(sampler, spacing, steps) for steps in (23, 92))
    assert many < few / 2
