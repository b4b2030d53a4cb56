"""The laws of sampling: exact scores give the right data, and an image depends on its seed alone."""

from __future__ import annotations

import itertools
import sys
from functools import partial

import diffusers
import pytest
import torch
from exact_scores import MEAN, STD, build, gaussian_predictor, seeded_noise
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from scalelong.diffusion import SAMPLERS, SCHEDULES, noise_predictor, sample, to_uint8
from scalelong.diffusion.guidance import Predictor
from scalelong.diffusion.samplers import solver_indices
from scalelong.models import UViT

# Steps, and the share of the standard deviation that they may miss: the error of the discretisation, by order.
BUDGETS = {
    "ddim": (100, 0.03),
    "ddpm": (200, 0.04),
    "dpm-solver++": (50, 0.02),
    "dpm-solver++-sde": (100, 0.02),
    "heun": (30, 0.02),
    "unipc": (30, 0.02),
    "dpm-solver-3": (50, 0.02),
    "dpm-solver++-3": (50, 0.02),
    "euler-maruyama": (200, 0.04),
    "ode": (200, 0.03),
    "ode-heun": (50, 0.02),
}
KINDS = list(itertools.product(SCHEDULES, ["discrete", "continuous"]))

kinds = pytest.mark.parametrize("kind", KINDS, ids="-".join)
samplers = pytest.mark.parametrize("sampler", SAMPLERS)


# Exact scores


@kinds
@samplers
def test_the_exact_score_of_gaussian_data_gives_its_mean_and_deviation(kind, sampler: str) -> None:
    process, (steps, missing) = build(kind), BUDGETS[sampler]
    images = sample(
        gaussian_predictor(process), process, (1, 32, 32), seeds=range(32), steps=steps, sampler=sampler, clip=False
    )
    # Standard error 0.001; the sqrt-linear schedule ends at ᾱ = 0.005, so that starting without a mean costs 0.005.
    assert images.mean().item() == pytest.approx(MEAN, abs=0.01)
    assert images.std().item() == pytest.approx(STD, rel=missing)


@samplers
def test_every_prediction_of_one_network_gives_the_same_image(sampler: str) -> None:
    images = []
    for prediction in ("epsilon", "x0", "v"):
        process = build(prediction=prediction)
        images.append(sample(gaussian_predictor(process), process, (1, 8, 8), seeds=[5], sampler=sampler))
    # The noisiest x_0 is recovered from ε with a factor of 1/sqrt(ᾱ) = 157 on float32's rounding.
    torch.testing.assert_close(images[0], images[1], atol=1e-4, rtol=0)
    torch.testing.assert_close(images[0], images[2], atol=1e-4, rtol=0)


# diffusers


def plain_loop(
    scheduler, predict: Predictor, x: Tensor, generators: list[torch.Generator] | None = None, **options: bool
) -> Tensor:
    """Sampling as diffusers' pipelines write it."""
    given = options if generators is None else {"generator": generators, **options}
    x = x * scheduler.init_noise_sigma
    for t in scheduler.timesteps:
        fed = scheduler.scale_model_input(x, t)
        x = scheduler.step(predict(fed, t.long().expand(len(x))), t, x, **given).prev_sample
    return x


THEIRS = {
    "ddpm": (diffusers.DDPMScheduler, {"clip_sample": False}),
    "dpm-solver++": (diffusers.DPMSolverMultistepScheduler, {}),
    "dpm-solver++-sde": (diffusers.DPMSolverMultistepScheduler, {"algorithm_type": "sde-dpmsolver++"}),
    "heun": (diffusers.HeunDiscreteScheduler, {"timestep_spacing": "trailing"}),
    "unipc": (diffusers.UniPCMultistepScheduler, {}),
}


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize(("ours", "theirs"), [("epsilon", "epsilon"), ("x0", "sample"), ("v", "v_prediction")])
@pytest.mark.parametrize("sampler", THEIRS)
def test_at_the_same_times_sampling_is_the_plain_loop_of_diffusers(
    sampler: str, ours: str, theirs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, (kind, options) = build(prediction=ours), THEIRS[sampler]
    scheduler = kind(prediction_type=theirs, beta_end=0.02, beta_start=1e-4, **options)
    scheduler.set_timesteps(30)
    generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
    noise = torch.stack([torch.randn(3, 8, 8, generator=generator) for generator in generators])
    sampled = generators if sampler in ("ddpm", "dpm-solver++-sde") else None
    expected = plain_loop(scheduler, gaussian_predictor(process), noise, sampled)
    times = sorted({int(t) for t in scheduler.timesteps}, reverse=True)
    monkeypatch.setattr("scalelong.diffusion.samplers.solver_indices", lambda *_, **__: times)
    images = sample(gaussian_predictor(process), process, (3, 8, 8), seeds=range(3), sampler=sampler, clip=False)
    torch.testing.assert_close(images, expected, atol=1e-4, rtol=0)


def test_ddim_is_that_of_diffusers_where_its_strides_are_even() -> None:
    process = build(num_steps=40)
    scheduler = diffusers.DDIMScheduler(num_train_timesteps=40, clip_sample=False)
    scheduler.set_timesteps(40)
    noise = seeded_noise(range(3), 3, 8, 8)
    expected = plain_loop(scheduler, gaussian_predictor(process), noise)
    images = sample(gaussian_predictor(process), process, noise, seeds=range(3), steps=40, clip=False)
    torch.testing.assert_close(images, expected, atol=1e-5, rtol=0)


# One seed, one image


@samplers
@pytest.mark.parametrize("kind", [("linear", "discrete"), ("cosine", "continuous")], ids="-".join)
def test_an_image_is_the_same_whatever_the_batch(kind, sampler: str) -> None:
    process = build(kind)
    generate = partial(sample, gaussian_predictor(process), process, (3, 5, 5), steps=10, sampler=sampler)
    seeds = [11, 7, 3, 8, 42]
    together = generate(seeds=seeds)
    assert torch.equal(together, torch.cat([generate(seeds=[seed]) for seed in seeds]))
    assert torch.equal(together, torch.cat([generate(seeds=seeds[:2]), generate(seeds=seeds[2:])]))
    assert torch.equal(together.flip(0), generate(seeds=seeds[::-1]))
    assert len({image.sum().item() for image in together}) == len(seeds)


@samplers
def test_neither_the_global_generator_nor_given_noise_changes_an_image(sampler: str) -> None:
    process, seeds = build(), range(3)
    generate = partial(sample, gaussian_predictor(process), process, seeds=seeds, steps=10, sampler=sampler)
    sampled = generate((1, 8, 8))
    torch.manual_seed(99)
    before = torch.get_rng_state()
    assert torch.equal(generate(seeded_noise(seeds, 1, 8, 8)), sampled)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(generate(torch.zeros(3, 1, 8, 8)), sampled)


# The solver's times


@given(steps=st.integers(1, 1000))
def test_solver_indices_fall_from_the_noisiest_to_the_cleanest_without_repeats(steps: int) -> None:
    indices = solver_indices(build(), steps)
    assert len(set(indices)) == len(indices) == steps
    assert indices == sorted(indices, reverse=True)
    assert indices[0] == 999 and (steps == 1 or indices[-1] == 0)


def test_the_cosine_schedule_starts_where_noise_can_still_be_told_from_the_image() -> None:
    process = build(("cosine", "discrete"))
    first = solver_indices(process, 50)[0]
    signal = process.schedule.alphas_cumprod
    assert first < 999 and 3e-5 < signal[first] < 6e-5 < 2 * signal[first]
    assert solver_indices(process, 1000) == list(range(999, -1, -1))


@pytest.mark.parametrize(
    ("time", "expected"), [("discrete", [999, 444, 111, 0]), ("continuous", [1.0, 0.445, 0.112, 0.001])]
)
def test_the_network_is_fed_the_times_that_it_was_trained_on(time: str, expected: list[float]) -> None:
    process, fed = build(("linear", time)), []

    def predict(x: Tensor, t: Tensor) -> Tensor:
        assert t.shape == (2,) and (t == t[0]).all()
        fed.append(t[0])
        return torch.zeros_like(x)

    sample(predict, process, (1, 4, 4), seeds=[0, 1], steps=4)
    trained = process.model_time(torch.tensor(expected))
    torch.testing.assert_close(torch.stack(fed), trained, atol=0, rtol=1e-6)


# The edges


@samplers
def test_clipping_keeps_every_estimate_and_the_image_within_the_range_of_the_data(sampler: str) -> None:
    process = build(prediction="x0")
    generate = partial(sample, process=process, start=(1, 4, 4), seeds=[0], sampler=sampler)
    clipped = generate(lambda x, t: 3 * x)
    assert clipped.abs().max() <= 1
    assert torch.equal(clipped, generate(lambda x, t: (3 * x).clamp(-1, 1)))
    assert generate(lambda x, t: torch.full_like(x, 3.0), clip=False).min() > 2.9


@samplers
def test_a_network_in_half_precision_is_sampled_in_single_precision(sampler: str) -> None:
    process = build()
    exact = gaussian_predictor(process)
    generate = partial(sample, process=process, start=(1, 8, 8), seeds=[0], sampler=sampler)
    images = generate(lambda x, t: exact(x, t).bfloat16())
    assert images.dtype == torch.float32
    torch.testing.assert_close(images, generate(exact), atol=0.02, rtol=0)  # bfloat16 rounds ε by up to 0.008


def test_progress_counts_every_step() -> None:
    process, seen = build(), []
    sample(
        gaussian_predictor(process), process, (1, 4, 4), seeds=[0], steps=3, progress=lambda *done: seen.append(done)
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("sampler", ["heun", "ode-heun"])
def test_the_steps_of_heun_s_method_evaluate_the_network_twice_but_for_the_last(sampler: str) -> None:
    process, fed, seen = build(prediction="x0"), [], []

    def predict(x: Tensor, t: Tensor) -> Tensor:
        fed.append(t.item())
        return torch.zeros_like(x)

    count = partial(sample, predict, process, (1, 4, 4), seeds=[0], sampler=sampler)
    count(steps=4, progress=lambda *done: seen.append(done))
    assert fed == [999, 444, 444, 111, 111, 0, 0]
    assert seen[-1] == (7, 7)


def tiny_uvit() -> torch.nn.Module:
    return UViT(8, 2, in_chans=1, embed_dim=16, depth=2, num_heads=2)


def tiny_unet() -> torch.nn.Module:
    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (8,)}
    return diffusers.UNet2DModel(8, 1, 1, layers_per_block=1, norm_num_groups=4, add_attention=False, **blocks)


@pytest.mark.parametrize("make", [tiny_uvit, tiny_unet])
@pytest.mark.parametrize("time", ["discrete", "continuous"])
def test_networks_of_both_call_styles_are_sampled_without_gradients(make, time: str) -> None:
    model = make().eval()
    images = sample(noise_predictor(model), build(("linear", time)), (1, 8, 8), seeds=[1, 2], steps=3)
    assert images.shape == (2, 1, 8, 8) and not images.requires_grad
    x, t = torch.randn(2, 1, 8, 8), torch.tensor([3, 900])
    output = model(x, t)
    assert torch.equal(noise_predictor(model)(x, t), output if make is tiny_uvit else output.sample)


@given(level=st.integers(0, 255))
def test_every_grey_level_survives_the_way_to_the_network_and_back(level: int) -> None:
    assert to_uint8(torch.tensor(level / 127.5 - 1)).item() == level


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": "ddmi"}, "no sampler 'ddmi'; known: ddim, ddpm, dpm-solver"),
        ({"steps": 0}, "steps must be between 1 and 1000, the schedule's number of times, got 0"),
        ({"steps": 1001}, "got 1001"),
        ({"seeds": []}, "expected at least one seed, got 0"),
        ({"start": torch.zeros(3, 1, 4, 4)}, "expected 3 seeds for as many noises, got 1"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(options: dict, message: str) -> None:
    arguments = {"start": (1, 4, 4), "seeds": [0], **options}
    with pytest.raises(ValueError, match=message):
        sample(gaussian_predictor(build()), build(), **arguments)


def test_without_diffusers_sampling_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ImportError, match=r"pip install 'scalelong\[train\]'"):
        sample(gaussian_predictor(build()), build(), (1, 4, 4), seeds=[0])
