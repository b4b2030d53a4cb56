"""The laws of noise schedules, tied to diffusers in discrete time and to integrals in continuous time."""

from __future__ import annotations

import pytest
import torch
from diffusers import DDPMScheduler
from hypothesis import given
from hypothesis import strategies as st

from scalelong.diffusion import SCHEDULES, CosineSchedule, LinearSchedule, SqrtLinearSchedule, build_schedule

DIFFUSERS = {
    "linear": {"beta_schedule": "linear"},
    "cosine": {"beta_schedule": "squaredcos_cap_v2"},
    "sqrt-linear": {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012},
}
RATES = {"linear": lambda t: 0.1 + 19.9 * t, "sqrt-linear": lambda t: (0.85**0.5 + (12**0.5 - 0.85**0.5) * t) ** 2}
names = pytest.mark.parametrize("name", SCHEDULES)
times = pytest.mark.parametrize("time", ["discrete", "continuous"])


@names
def test_discrete_alphas_are_those_of_diffusers(name: str) -> None:
    theirs = DDPMScheduler(**DIFFUSERS[name])
    ours = build_schedule(name)
    torch.testing.assert_close(ours.alphas_cumprod, theirs.alphas_cumprod, atol=1e-6, rtol=0)
    torch.testing.assert_close(ours.betas.float(), theirs.betas, atol=1e-7, rtol=0)


@pytest.mark.parametrize("name", RATES)
def test_the_closed_form_is_the_integral_of_the_rate(name: str) -> None:
    grid = torch.linspace(0, 1, 100_001, dtype=torch.float64)
    integral = torch.cumulative_trapezoid(RATES[name](grid), grid)
    ours = build_schedule(name, time="continuous").log_alpha_bar(grid[1:])
    torch.testing.assert_close(ours, -integral, atol=1e-8, rtol=1e-8)


def test_the_continuous_cosine_is_the_discrete_one_between_its_steps() -> None:
    discrete, continuous = CosineSchedule(), CosineSchedule(time="continuous")
    log_alphas = torch.log1p(-discrete.betas).cumsum(0)
    torch.testing.assert_close(continuous.log_alpha_bar(continuous.times), log_alphas, atol=1e-9, rtol=1e-9)


def test_the_continuous_linear_schedule_is_the_limit_of_finer_steps() -> None:
    gaps = []
    for fold in (1, 10, 100):
        options = {"num_steps": 1000 * fold, "beta_start": 1e-4 / fold, "beta_end": 0.02 / fold}
        discrete, continuous = LinearSchedule(**options), LinearSchedule(time="continuous", **options)
        gaps.append((discrete.alphas_cumprod - continuous.alphas_cumprod).abs().max().item())
    assert gaps[0] < 2e-3 and gaps[1] < gaps[0] / 8 and gaps[2] < gaps[1] / 8


@names
@times
def test_alphas_cumprod_agrees_with_looking_up_every_time(name: str, time) -> None:
    schedule = build_schedule(name, time=time)
    looked_up = schedule.log_alpha_bar(schedule.times).exp()
    torch.testing.assert_close(looked_up.float(), schedule.alphas_cumprod, atol=1e-7, rtol=2e-6)


@names
@times
def test_alphas_fall_strictly_and_stay_between_zero_and_one(name: str, time) -> None:
    alphas = build_schedule(name, time=time).alphas_cumprod
    assert (alphas.diff() < 0).all() and alphas[0] < 1 and alphas[-1] > 0


@names
@given(t=st.floats(1e-5, 1))
def test_single_precision_loses_neither_end_of_the_closed_form(name: str, t: float) -> None:
    schedule = build_schedule(name, time="continuous")
    single = schedule.log_alpha_bar(torch.tensor([t], dtype=torch.float32)).double()
    double = schedule.log_alpha_bar(torch.tensor([t], dtype=torch.float64))
    torch.testing.assert_close(-torch.expm1(single), -torch.expm1(double), atol=0, rtol=1e-6)  # noise, also at t = 1e-5
    torch.testing.assert_close(torch.exp(single / 2), torch.exp(double / 2), atol=1e-6, rtol=1e-6)


def test_a_table_made_in_inference_mode_serves_training() -> None:
    schedule = LinearSchedule(num_steps=7)
    with torch.inference_mode():
        schedule.log_alpha_bar(torch.tensor([3]))
    weight = torch.ones(1, requires_grad=True)
    (weight * schedule.log_alpha_bar(torch.tensor([3]))).sum().backward()
    assert weight.grad is not None and weight.grad.item() < 0


def test_equal_schedules_are_equal_and_say_what_they_are() -> None:
    assert build_schedule("sqrt-linear") == SqrtLinearSchedule(beta_start=0.00085, beta_end=0.012)
    assert "num_steps=50" in repr(build_schedule("cosine", num_steps=50))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: build_schedule("liner"), "did you mean 'linear'"),
        (lambda: build_schedule("linear", time="none"), "time must be one of discrete, continuous, got 'none'"),
        (lambda: build_schedule("linear", num_steps=0), "num_steps must be at least 1, got 0"),
        (lambda: LinearSchedule(beta_start=0.1, beta_end=0.01), "beta_start ≤ beta_end"),
        (lambda: SqrtLinearSchedule(beta_end=20.0), "beta_end < 1"),
        (lambda: CosineSchedule(max_beta=1.0), "max_beta in"),
        (lambda: LinearSchedule().log_alpha_bar(torch.tensor([0.5])), "integers below 1000"),
        (lambda: LinearSchedule(time="continuous").log_alpha_bar(torch.tensor([1])), "floats in"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
