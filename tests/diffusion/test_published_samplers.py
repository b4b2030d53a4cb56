"""The samplers of the published code, written down once more from their papers' formulas and compared with ours.

They run on one pixel at a time in float64, with their own schedule and the exact score of N(MEAN, STD²): Euler–Maruyama
and DPM-Solver-3 as U-ViT uses them on images, DPM-Solver++ as it uses it on latents, and DDPM with both variances.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from exact_moments import bias
from exact_scores import MEAN, build, gaussian_predictor

from scalelong.diffusion import sample

STD = 0.5
BETA_FIRST, BETA_LAST = 0.1, 20.0
Estimate = Callable[[float, float], float]


def log_signal(t: float) -> float:
    """log ᾱ(t) of the variance-preserving SDE."""
    return -(BETA_FIRST * t + (BETA_LAST - BETA_FIRST) * t**2 / 2)


def time_of(half_log_snr: float) -> float:
    """Where log ᾱ(t) = −log(1 + exp(−2λ)), a quadratic equation in t."""
    constant = math.log1p(math.exp(-2 * half_log_snr))
    slope = BETA_LAST - BETA_FIRST
    return (math.sqrt(BETA_FIRST**2 + 2 * slope * constant) - BETA_FIRST) / slope


def scales(log_ratio: float) -> tuple[float, float, float]:
    """α, σ and λ where log ᾱ is this."""
    alpha, sigma = math.exp(log_ratio / 2), math.sqrt(-math.expm1(log_ratio))
    return alpha, sigma, math.log(alpha / sigma)


def noise_estimate(x: float, log_ratio: float) -> float:
    """E[ε | x_t] for the data."""
    alpha, sigma, _ = scales(log_ratio)
    return sigma * (x - alpha * MEAN) / (alpha**2 * STD**2 + sigma**2)


def image_estimate(x: float, log_ratio: float) -> float:
    alpha, sigma, _ = scales(log_ratio)
    return (x - sigma * noise_estimate(x, log_ratio)) / alpha


# Lu et al. 2022, Algorithms 1 and 2 and the order of steps of Appendix D.4; U-ViT starts at 1 and ends at 1e-4.


def noise_step(x: float, start: float, end: float, order: int) -> float:
    """One step from time to time, of ε."""
    (alpha, _, first), (alpha_end, sigma_end, last) = (scales(log_signal(t)) for t in (start, end))
    h, noise = last - first, noise_estimate(x, log_signal(start))
    whole = alpha_end / alpha * x - sigma_end * math.expm1(h) * noise
    if order == 1:
        return whole

    def inner(share: float, correction: float = 0.0) -> tuple[float, float]:
        t = time_of(first + share * h)
        alpha_t, sigma_t, _ = scales(log_signal(t))
        at = alpha_t / alpha * x - sigma_t * (math.expm1(share * h) * noise + correction)
        return at, noise_estimate(at, log_signal(t)) - noise

    if order == 2:
        # x_t = (α_t/α_s)·x_s − σ_t·(e^h − 1)·ε(u, s_1), s_1 half-way.
        return whole - sigma_end * math.expm1(h) * inner(1 / 2)[1]
    one, two = 1 / 3, 2 / 3
    change = two / one * (math.expm1(two * h) / (two * h) - 1) * inner(one)[1]
    return whole - sigma_end / two * (math.expm1(h) / h - 1) * inner(two, change)[1]


def fast_orders(evaluations: int) -> list[int]:
    number = evaluations // 3 + 1
    return [3] * (number - 2) + [2, 1] if evaluations % 3 == 0 else [3] * (number - 1) + [evaluations % 3]


def dpm_solver_fast(x: float, evaluations: int) -> float:
    orders = fast_orders(evaluations)
    first, last = (scales(log_signal(t))[2] for t in (1.0, 1e-4))
    times = [time_of(first + (last - first) * place / len(orders)) for place in range(len(orders) + 1)]
    for start, end, order in zip(times, times[1:], orders, strict=False):
        x = noise_step(x, start, end, order)
    return x


def sampled(noises: Sequence[float], **options) -> list[float]:
    process = build(("linear", "continuous"))
    start = torch.tensor(noises).reshape(-1, 1, 1, 1)
    predict = gaussian_predictor(process, STD)
    return sample(predict, process, start, seeds=range(len(noises)), clip=False, **options).flatten().tolist()


NOISES = (-2.0, -0.5, 0.0, 1.0, 2.5)


@pytest.mark.parametrize("evaluations", [9, 10, 11, 50])
def test_dpm_solver_3_on_log_snr_is_the_sampler_of_the_published_uvit(evaluations: int) -> None:
    ours = sampled(NOISES, steps=evaluations, sampler="dpm-solver-3", timestep_spacing="logsnr")
    assert ours == pytest.approx([dpm_solver_fast(noise, evaluations) for noise in NOISES], abs=2e-5)


# Lu et al. 2022b, DPM-Solver++(3S) with r_1, r_2 of evenly spaced times; on latents U-ViT goes from 1 to 1/1000.


def image_step(x: float, logs: Sequence[float]) -> float:
    """One step of as many evaluations as there are intervals, of x_0."""
    known = [scales(value) for value in logs]
    (_, sigma, first), (alpha_end, sigma_end, last) = known[0], known[-1]
    h, image = last - first, image_estimate(x, logs[0])
    whole = sigma_end / sigma * x - alpha_end * math.expm1(-h) * image
    if len(logs) == 2:
        return whole

    def inner(place: int, correction: float = 0.0) -> float:
        alpha_t, sigma_t, there = known[place]
        at = sigma_t / sigma * x - alpha_t * (math.expm1(first - there) * image - correction)
        return image_estimate(at, logs[place]) - image

    shares = [(there - first) / h for _, _, there in known]
    if len(logs) == 3:
        return whole - alpha_end * math.expm1(-h) / (2 * shares[1]) * inner(1)
    part = shares[2] * h
    change = shares[2] / shares[1] * (math.expm1(-part) / part + 1) * inner(1)
    return whole + alpha_end / shares[2] * (math.expm1(-h) / h + 1) * inner(2, change)


@pytest.mark.parametrize("evaluations", [9, 27, 37, 111])
def test_dpm_solver_plus_plus_3_on_even_times_is_the_sampler_of_the_published_uvit_on_latents(evaluations: int) -> None:
    process = build(("sqrt-linear", "discrete"))
    # 999 is a multiple of these numbers, so that no time is rounded.
    times = [999 - 999 // evaluations * place for place in range(evaluations + 1)]
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    logs = torch.log(1 - betas).cumsum(0)[times].tolist()
    expected = []
    for x in NOISES:
        at = 0
        for order in fast_orders(evaluations):
            x = image_step(x, logs[at : at + order + 1])
            at += order
        expected.append(x)
    start = torch.tensor(NOISES).reshape(-1, 1, 1, 1)
    options = {"steps": evaluations, "sampler": "dpm-solver++-3", "timestep_spacing": "linspace", "clip": False}
    ours = sample(gaussian_predictor(process, STD), process, start, seeds=range(len(NOISES)), **options)
    assert ours.flatten().tolist() == pytest.approx(expected, abs=2e-5)


# Song et al. 2021: dx = −β(t)·(x/2 + s)·dt + sqrt(β(t))·dw backwards; U-ViT steps from k/1000 to (k − 1)/1000.


def reverse_sde(x: float, draws: Sequence[float]) -> float:
    for k, draw in zip(range(1000, 0, -1), draws, strict=True):
        t = k / 1000
        beta = BETA_FIRST + t * (BETA_LAST - BETA_FIRST)
        score = -noise_estimate(x, log_signal(t)) / scales(log_signal(t))[1]
        x += beta * (x / 2 + score) / 1000 + (math.sqrt(beta / 1000) * draw if k > 1 else 0)
    return x


def test_euler_maruyama_is_the_sde_of_the_published_uvit_but_for_the_length_of_its_steps() -> None:
    ours = sampled([0.0] * 4, steps=1000, sampler="euler-maruyama")
    expected = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        draws = [torch.randn(1, 1, 1, generator=generator).item() for _ in range(1001)]  # The first is the start's.
        expected.append(reverse_sde(0.0, [*draws[1:1000], 0.0]))
    # β(t)·Δt is larger than ∫β by 1e-5 in each step: 2 % of the deviation along a path.
    assert ours == pytest.approx(expected, abs=0.02 * STD)


def test_at_1000_steps_the_sde_misses_one_percent_of_the_variance_and_that_of_the_published_uvit_less() -> None:
    ratios = {}
    for std in (0.2, 0.5):
        variance = 1.0
        for k in range(1000, 0, -1):
            t, signal = k / 1000, math.exp(log_signal(k / 1000))
            length = (BETA_FIRST + t * (BETA_LAST - BETA_FIRST)) / 1000
            factor = 1 + length / 2 - length / (signal * std**2 + 1 - signal)
            variance = factor**2 * variance + (length if k > 1 else 0)
        ratios[std] = variance / std**2 - 1
    assert ratios == pytest.approx({0.2: -0.0010, 0.5: 0.0009}, abs=5e-5)


# Ho et al. 2020, Algorithm 2, with σ² = β ("fixedlarge") or that of q(x_{t−1} | x_t, x_0) ("fixedsmall").


def ddpm_bias(betas: torch.Tensor, std: float, variance: str) -> float:
    """How far the variance is from that of the data, as a share of it; ε is linear in x_t."""
    signals = [1.0, *(1 - betas).cumprod(0).tolist()]
    found = 1.0
    for before, signal, beta in reversed(list(zip(signals[:-1], signals[1:], betas.tolist(), strict=True))):
        # x_{t−1} = (x_t − β/sqrt(1−ᾱ)·ε)/sqrt(1−β) + σ·z
        noise = math.sqrt(1 - signal) / (signal * std**2 + 1 - signal)
        factor = (1 - beta / math.sqrt(1 - signal) * noise) / math.sqrt(1 - beta)
        drawn = beta if variance == "large" else beta * (1 - before) / (1 - signal)
        found = factor**2 * found + (drawn if before < 1 else 0)
    return found / std**2 - 1


@pytest.mark.parametrize(("variance", "expected"), [("small", -0.037), ("large", 0.009)])
def test_the_published_ddpm_has_this_bias_in_its_1000_steps(variance: str, expected: float) -> None:
    betas = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
    assert ddpm_bias(betas, 0.2, variance) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("variance", ["small", "large"])
def test_ddpm_on_all_times_is_the_published_algorithm_with_either_variance(variance: str) -> None:
    process = build(num_steps=100)
    expected = ddpm_bias(process.schedule.betas, 0.2, variance)
    # diffusers rounds 1 − ᾱ to float32.
    assert bias(process, "ddpm", 100, 0.2, variance=variance) == pytest.approx(expected, abs=2e-4)
