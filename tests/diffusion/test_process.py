"""The laws of noising, of the three predictions and of the loss."""

from __future__ import annotations

import itertools

import pytest
import torch
from diffusers import DDPMScheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scalelong.diffusion import SCHEDULES, DiffusionProcess, LinearSchedule, build_schedule

PREDICTIONS = ["epsilon", "x0", "v"]
SCHEDULE_KINDS = list(itertools.product(SCHEDULES, ["discrete", "continuous"]))

predictions = pytest.mark.parametrize("prediction", PREDICTIONS)
kinds = pytest.mark.parametrize("kind", SCHEDULE_KINDS, ids="-".join)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def build(kind: tuple[str, str] = ("linear", "discrete"), prediction="epsilon", **options) -> DiffusionProcess:
    return DiffusionProcess(build_schedule(kind[0], time=kind[1]), prediction, **options)  # type: ignore[arg-type]


def batch(process: DiffusionProcess, count: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Images in [-1, 1], noise, and times that span the range."""
    x0 = torch.rand(count, 3, 4, 4) * 2 - 1
    return x0, torch.randn(count, 3, 4, 4), process.stratified_times(count, generator())


def alpha_bar(process: DiffusionProcess, t: Tensor) -> Tensor:
    return process.schedule.log_alpha_bar(t).exp()


# Noising


def test_noised_images_are_those_of_diffusers() -> None:
    process, theirs = build(), DDPMScheduler()
    x0, noise, _ = batch(process, 1000)
    t = torch.arange(1000)
    # diffusers takes 1 − ᾱ of a float32, which is off by 3e-4 of itself at t = 0, where its root is 0.01.
    torch.testing.assert_close(process.add_noise(x0, noise, t), theirs.add_noise(x0, noise, t), atol=1e-5, rtol=0)


@kinds
def test_a_noised_image_has_the_mean_and_variance_of_eq_1(kind) -> None:
    process, x0 = build(kind), 0.7
    for t in process.stratified_times(4, generator()):
        noisy = process.add_noise(torch.full((1, 200_000), x0), torch.randn(1, 200_000), t[None])
        signal = alpha_bar(process, t[None]).item()
        assert noisy.mean().item() == pytest.approx(signal**0.5 * x0, abs=0.01)  # 4 standard errors of the mean
        assert noisy.var().item() == pytest.approx(1 - signal, rel=0.015)  # 4 standard errors of the variance


def test_uniform_images_have_the_squared_norm_of_lemma_3_2() -> None:
    process, size = build(), 3072
    t = torch.arange(1000)
    x0, noise = torch.rand(1000, size) * 2 - 1, torch.randn(1000, size)
    mean_norm = process.add_noise(x0, noise, t).square().sum(1).mean().item()
    expected = 1 - 2 / 3 * process.schedule.alphas_cumprod.mean().item()
    assert expected == pytest.approx(0.8163, abs=5e-5)
    assert mean_norm == pytest.approx(expected * size, rel=3e-3)  # 4 standard errors of 3 million squares


@predictions
def test_half_precision_images_are_noised_and_scored_in_single_precision(prediction: str) -> None:
    process = build(prediction=prediction, min_snr_gamma=5.0)
    x0, noise, t = batch(process)
    half = [values.bfloat16() for values in (x0, noise, torch.randn_like(x0))]
    single = [values.float() for values in half]
    for method in ("add_noise", "target", "predict_x0"):
        result = getattr(process, method)(half[0], half[1], t)
        assert result.dtype == torch.float32
        assert torch.equal(result, getattr(process, method)(single[0], single[1], t))
    assert torch.equal(process.loss(half[2], half[0], half[1], t).mean, process.loss(*single[2:], *single[:2], t).mean)


# Predictions


@kinds
@predictions
def test_the_target_gives_back_the_image(kind, prediction: str) -> None:
    process = build(kind, prediction)
    x0, noise, t = batch(process, 64)
    noisy, target = process.add_noise(x0, noise, t), process.target(x0, noise, t)
    alpha = alpha_bar(process, t).sqrt().reshape(-1, 1, 1, 1)
    # Dividing by alpha enlarges the rounding of x_t, so errors are compared before the division.
    torch.testing.assert_close(alpha * process.predict_x0(target, noisy, t), alpha * x0, atol=2e-6, rtol=0)


def test_velocity_is_that_of_diffusers() -> None:
    process = build(prediction="v")
    x0, noise, _ = batch(process, 1000)
    t = torch.arange(1000)
    theirs = DDPMScheduler().get_velocity(x0, noise, t)
    torch.testing.assert_close(process.target(x0, noise, t), theirs, atol=1e-5, rtol=0)


# Loss


@predictions
def test_the_loss_of_the_target_is_zero_and_of_an_offset_is_its_square(prediction: str) -> None:
    process = build(prediction=prediction)
    x0, noise, t = batch(process)
    target = process.target(x0, noise, t)
    assert process.loss(target, x0, noise, t).mean == 0
    offset = torch.linspace(0, 2, 16).reshape(-1, 1, 1, 1)
    loss = process.loss(target + offset, x0, noise, t)
    torch.testing.assert_close(loss.per_sample, offset.flatten() ** 2, atol=1e-6, rtol=1e-6)
    assert torch.equal(loss.mean, loss.per_sample.mean())


@kinds
@settings(max_examples=25)
@given(gamma=st.floats(0.1, 20))
def test_min_snr_weights_are_one_loss_whatever_is_predicted(kind, gamma: float) -> None:
    x0, noise, t = batch(build(kind))
    guess = x0 + 0.1 * torch.randn_like(x0)
    losses = []
    for prediction in PREDICTIONS:
        process = build(kind, prediction, min_snr_gamma=gamma)
        noisy = process.add_noise(x0, noise, t)
        log_signal = process.schedule.log_alpha_bar(t).reshape(-1, 1, 1, 1)
        implied = (noisy - torch.exp(log_signal / 2) * guess) / torch.sqrt(-torch.expm1(log_signal))
        losses.append(process.loss(process.target(guess, implied, t), x0, noise, t).per_sample)
    snr = torch.logit(alpha_bar(process, t).double())
    expected = snr.exp().clamp(max=gamma) * (guess - x0).square().mean(dim=(1, 2, 3))
    for loss in losses:
        torch.testing.assert_close(loss.double(), expected, rtol=1e-3, atol=1e-7)


def test_min_snr_weights_are_clipped_at_gamma() -> None:
    t, gamma = torch.arange(1000), 5.0
    epsilon, x0, v = (build(prediction=prediction, min_snr_gamma=gamma).loss_weight(t) for prediction in PREDICTIONS)
    signal = LinearSchedule().alphas_cumprod
    snr = signal / (1 - signal)
    clipped = snr > gamma
    assert 0 < clipped.sum() < 1000
    assert (x0[clipped] == gamma).all() and (epsilon[~clipped] == 1).all()
    # 1 − ᾱ of a float32 is itself off by 3e-4 at t = 0.
    torch.testing.assert_close(x0, snr.clamp(max=gamma), rtol=1e-3, atol=0)
    torch.testing.assert_close(epsilon, snr.clamp(max=gamma) / snr, rtol=1e-3, atol=0)
    torch.testing.assert_close(v, snr.clamp(max=gamma) / (snr + 1), rtol=1e-3, atol=0)


@kinds
@predictions
def test_without_gamma_every_time_weighs_one(kind, prediction: str) -> None:
    process = build(kind, prediction)
    assert torch.equal(process.loss_weight(process.stratified_times(9, generator())), torch.ones(9))


# Times


@kinds
def test_times_are_uniform_and_within_the_range(kind) -> None:
    process = build(kind)
    t = process.sample_times(100_000, generator())
    if process.schedule.is_continuous:
        assert t.dtype == torch.float32 and t.min() >= 1e-5 and t.max() <= 1
        position = t
    else:
        assert t.dtype == torch.int64 and t.min() == 0 and t.max() == 999
        position = (t + 0.5) / 1000
    counts = torch.histc(position.float(), bins=10, min=0, max=1)
    assert ((counts - 10_000).abs() < 400).all()  # 4 standard deviations


@kinds
def test_the_generator_alone_decides_the_times(kind) -> None:
    process = build(kind)
    for draw in (process.sample_times, process.stratified_times):
        torch.manual_seed(1)
        first = draw(64, generator(3))
        torch.manual_seed(2)
        assert torch.equal(draw(64, generator(3)), first)
        assert not torch.equal(draw(64, generator(4)), first)


@kinds
@given(count=st.integers(1, 300), seed=st.integers(0, 99))
def test_stratified_times_fall_one_in_each_part(kind, count: int, seed: int) -> None:
    process = build(kind)
    ordered = process.stratified_times(count, generator(seed)).double().sort().values
    edges = torch.linspace(0, 1, count + 1, dtype=torch.float64)
    if process.schedule.is_continuous:
        parts, slack = ordered, 1.1e-5  # the range starts at 1e-5, and times are rounded to float32
    else:
        parts, slack = ordered / 1000, 1e-3  # an integer time stands for all of [t, t+1)
    assert (parts >= edges[:-1] - slack).all() and (parts <= edges[1:] + slack).all()


def test_stratified_times_of_all_steps_are_all_steps() -> None:
    assert build().stratified_times(1000, generator()).sort().values.tolist() == list(range(1000))


def test_stratified_times_are_uniform_within_their_part() -> None:
    t = build(("linear", "continuous")).stratified_times(10_000, generator()).double().sort().values
    within = (t - 1e-5) / (1 - 1e-5) * 10_000 - torch.arange(10_000)
    counts = torch.histc(within.float(), bins=4, min=0, max=1)
    assert ((counts - 2500).abs() < 180).all()  # 4 standard deviations


def test_stratified_times_come_in_random_order() -> None:
    t = build().stratified_times(1000, generator()).float()
    assert abs(torch.corrcoef(torch.stack([t, torch.arange(1000.0)]))[0, 1]) < 0.13  # 4 standard deviations


def test_the_network_is_fed_t_or_t_times_999() -> None:
    t = torch.tensor([0, 17, 999])
    assert build().model_time(t) is t
    fed = build(("linear", "continuous")).model_time(torch.tensor([0.5, 1.0]))
    assert fed.tolist() == [499.5, 999.0]


# The training path


@kinds
@predictions
def test_the_training_path_never_reads_a_value_back(kind, prediction: str) -> None:
    process = build(kind, prediction, min_snr_gamma=5.0)
    t = process.sample_times(4, generator(), device="meta")  # a meta tensor has no values: reading one raises
    x0 = torch.empty(4, 3, 8, 8, device="meta")
    noisy = process.add_noise(x0, x0, t)
    process.model_time(t)
    assert process.loss(process.predict_x0(x0, noisy, t), x0, x0, t).mean.device.type == "meta"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build(prediction="noise"), "prediction must be one of epsilon, x0, v, got 'noise'"),
        (lambda: build(min_snr_gamma=0.0), "min_snr_gamma must be positive"),
        (
            lambda: build().loss(
                torch.zeros(2, 6, 4, 4), *torch.zeros(2, 2, 3, 4, 4), torch.zeros(2, dtype=torch.long)
            ),
            r"returned \(2, 6, 4, 4\) for images of \(2, 3, 4, 4\)",
        ),
    ],
)
def test_bad_input_is_refused_with_what_to_do(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
