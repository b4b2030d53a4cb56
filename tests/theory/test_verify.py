"""The theory in numbers: the laws hold on sampled networks, and a law that is off is found out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from typer.testing import CliRunner

from scalelong import scale_skips
from scalelong.cli.app import app
from scalelong.theory import InputNorms, TheoryUNet, laws, verify
from scalelong.theory.input_norms import measure_datasets
from scalelong.theory.laws import feature_norm, feature_spread
from scalelong.theory.unet import (
    feature_norms,
    forward,
    gradient_norms,
    lipschitz,
    matrix_norms,
    output_changes,
    sample_batches,
    sample_networks,
    unit_inputs,
)

KAPPA = 0.7


@pytest.fixture(scope="module")
def quick() -> verify.Verification:
    return verify.verify_theory(verify.QUICK)


@pytest.fixture(scope="module")
def datasets() -> dict[str, InputNorms]:
    return measure_datasets()


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def module_of(networks: Tensor, which: int) -> TheoryUNet:
    """One sample as the model of the package, with its skips scaled by CS."""
    model = TheoryUNet(networks.shape[-1], len(networks) // 2, block_depth=networks.shape[1])
    for block, matrices in zip([*model.encoders, model.middle, *model.decoders], networks, strict=True):
        for parameter, matrix in zip(block.parameters(), matrices, strict=True):
            parameter.data = matrix[which].clone()
    return scale_skips(model, "cs", kappa=KAPPA)


def cs(num_skips: int) -> Tensor:
    """Shape: (N, 1)."""
    return torch.tensor([[KAPPA**i] for i in range(num_skips)])


@pytest.mark.parametrize(("num_skips", "block_depth"), [(1, 1), (3, 2), (4, 3)])
def test_every_sample_is_a_theory_unet_with_scaled_skips(num_skips: int, block_depth: int) -> None:
    networks = sample_networks(3, 16, num_skips, block_depth=block_depth, generator=seeded())
    x = unit_inputs(networks, seeded(1))
    output = forward(networks, x, cs(num_skips))[0]
    for row in range(3):
        expected = module_of(networks, row)(x[row].T).T
        torch.testing.assert_close(output[row], expected)


def test_the_sampled_matrices_are_kaimings() -> None:
    networks = sample_networks(50, 64, 2, generator=seeded())
    entries = networks[1:3].flatten()
    assert entries.var().item() == pytest.approx(2 / 64, rel=0.02)


def test_the_gradients_of_the_loss_differ_by_matrix_and_only_the_last_has_the_law() -> None:
    generator, sums = seeded(), torch.zeros(2, 10, dtype=torch.float64)
    for networks in sample_batches(600, 64, 2, generator):
        blocks, *norms = matrix_norms(networks, torch.ones(2, 1), generator)
        sums += torch.stack([norm.sum(0) for norm in norms])
        assert blocks == [0, 0, 1, 1, 2, 2, 1, 1, 0, 0]
    ratios = (sums[1] / sums[0])[[0, 1, 8, 9]].tolist()
    # 10 %: means over 600 networks.
    assert ratios == pytest.approx([11.5, 9.8, 3.0, 1.0], rel=0.1)


def test_the_sampled_gradients_are_those_of_the_module() -> None:
    networks = sample_networks(2, 12, 3, generator=seeded())
    found = gradient_norms(networks, cs(3), seeded(1))
    same = seeded(1)
    x, v, noise = (unit_inputs(networks, same) for _ in range(3))
    for row in range(2):
        model = module_of(networks, row)
        residual = model(x[row].T).T - noise[row]
        for values, direction in zip(found, (v[row], residual / residual.norm()), strict=True):
            model.zero_grad()
            (model(x[row].T).T * direction.detach()).sum().backward()
            pairs = zip(model.encoders, model.decoders, strict=True)
            blocks = [[*a.parameters(), *b.parameters()] for a, b in pairs] + [list(model.middle.parameters())]
            norms = [[p.grad.double().square().sum() for p in block if p.grad is not None] for block in blocks]
            expected = torch.stack([torch.stack(block).mean() for block in norms])
            torch.testing.assert_close(values[row], expected, rtol=1e-4, atol=0)


def test_the_largest_change_of_linear_networks_is_found_by_power_iteration() -> None:
    networks = sample_networks(20, 8, 2, block_depth=1, generator=seeded())
    found = output_changes(networks, cs(2), steps=300, size=0.1, generator=seeded(1))
    whole = torch.stack([forward(networks, torch.eye(8)[None].expand(20, 8, 8), cs(2))[0]])[0]
    torch.testing.assert_close(found[:, 0], torch.linalg.matrix_norm(whole, 2).double(), rtol=2e-3, atol=0)


def test_a_blocks_lipschitz_constant_is_the_product_of_its_spectral_norms() -> None:
    networks = sample_networks(5, 8, 1, generator=seeded())
    expected = torch.linalg.matrix_norm(networks, 2).prod(1)
    torch.testing.assert_close(lipschitz(networks), expected.double(), rtol=1e-4, atol=0)


def test_the_spread_of_the_samples_is_the_exact_one() -> None:
    networks = sample_networks(20_000, 16, 1, generator=seeded())
    norms = feature_norms(networks, torch.ones(1, 1), seeded(1))[:, 0, 0]
    # The variance of a heavy-tailed variance: its standard error is about 6 % here.
    assert (norms.var() / norms.mean() ** 2).item() == pytest.approx(feature_spread([1.0], width=16), rel=0.2)


def test_batches_of_networks_add_up() -> None:
    counts = [networks.shape[2] for networks in sample_batches(200, 64, 6, seeded())]
    assert len(counts) > 2 and sum(counts) == 200
    assert [networks.shape[2] for networks in sample_batches(3, 600, 6, seeded())] == [1, 1, 1]


def test_all_laws_hold_on_sampled_networks(quick: verify.Verification) -> None:
    broken = [check for check in quick.checks if not check.passed]
    assert not broken
    kinds = {check.law.split("_")[0] for check in quick.checks}
    assert kinds == {"E‖h", "share outside (1±ρ)² ≤", "E‖∇W", "robustness bound violated"}


def test_every_interval_around_a_mean_is_within_five_percent(quick: verify.Verification) -> None:
    widths = [check.half_width for check in quick.checks if check.half_width is not None]
    assert widths and max(widths) <= verify.WIDEST == 0.05


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_feature_law_that_is_off_by_a_tenth_is_broken_in_every_row(
    quick: verify.Verification, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    def wrong(*arguments: Any, **options: Any) -> float:
        return factor * feature_norm(*arguments, **options)

    monkeypatch.setattr(laws, "feature_norm", wrong)
    for num_skips, width, setting, check in quick.forward:
        spread = feature_spread(setting.kappas(num_skips), width=width, gain=setting.gain)
        root = (check.half_width or math.nan) / math.sqrt(spread)
        assert not verify.check_feature(num_skips, width, setting, 0, check.measured, root).passed


def test_an_interval_that_is_too_wide_is_no_confirmation() -> None:
    setting = verify.KAIMING[0]
    law = feature_norm(setting.kappas(2))
    assert verify.check_feature(2, 64, setting, 0, law, 0.01).passed
    assert not verify.check_feature(2, 64, setting, 0, law, 0.1).passed


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_gradient_law_that_is_off_by_a_tenth_is_broken(factor: float) -> None:
    values = torch.linspace(0.9, 1.1, 1000, dtype=torch.float64)
    assert verify.check_gradient("", 1, values, 1.0, 3.0, "").passed
    assert not verify.check_gradient("", 1, values, factor, 3.0, "").passed


def test_a_share_outside_the_band_above_the_stated_one_breaks_the_law() -> None:
    assert verify.check_share("", outside=0.10, limit=0.10, z=3.0, count=1000).passed
    assert not verify.check_share("", outside=0.14, limit=0.10, z=3.0, count=1000).passed


def test_a_robustness_bound_that_is_too_small_is_violated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laws, "robustness_bound", lambda kappas, gain, middle: 1.0)
    sizes = replace(verify.QUICK, robustness=((2, 8, 20),))
    found = verify.Verification()
    verify.verify_robustness(sizes, found, seeded())
    assert found.checks and not any(check.passed for check in found.checks)


def test_the_robustness_bound_is_tried_on_thousands_of_networks(quick: verify.Verification) -> None:
    tried = sum(len(ratios) for _, _, ratios in quick.looseness)
    assert tried >= 2000
    assert min(ratios.min().item() for _, _, ratios in quick.looseness) >= 1


def test_the_denoising_loss_has_larger_gradients_than_an_independent_direction(quick: verify.Verification) -> None:
    # The residual contains the network's own output, which its matrices amplify more than a random direction.
    assert all(denoising > 3 * law for *_, denoising, law in quick.gradient)


def test_the_size_of_noised_images_follows_lemma_3_2(datasets: dict[str, InputNorms]) -> None:
    checks = verify.verify_inputs(datasets)
    assert [check.where.split(",")[0] for check in checks] == ["uniform", "digits"]
    assert all(check.passed for check in checks)


def test_digits_are_not_uniform_and_break_the_lemma_that_assumes_it(
    datasets: dict[str, InputNorms],
) -> None:
    (check,) = verify.verify_inputs({"digits": replace(datasets["digits"], second_moment=1 / 3)})
    assert not check.passed


@pytest.fixture
def theory_command(
    quick: verify.Verification, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[list[verify.Check]], Any]:
    pytest.importorskip("matplotlib")

    def run(checks: list[verify.Check]) -> Any:
        monkeypatch.setattr(verify, "verify_theory", lambda sizes, seed: replace(quick, checks=checks))
        return CliRunner().invoke(app, ["theory", "--quick", "--out", str(tmp_path)], prog_name="scalelong")

    return run


def test_the_command_prints_every_check_and_draws_all_figures(
    quick: verify.Verification, theory_command: Callable[[list[verify.Check]], Any], tmp_path: Path
) -> None:
    result = theory_command(quick.checks)
    assert result.exit_code == 0, result.output
    count = len(quick.checks) + 2
    assert f"{count} of {count} checks passed" in result.stdout
    assert all(check.where in result.stdout for check in quick.checks)
    assert str(tmp_path / "theory-forward.png") in result.stdout
    names = {"forward", "band", "gradients", "robustness", "inputs"}
    assert {path.name for path in tmp_path.iterdir()} == {f"theory-{name}.png" for name in names}
    assert all(path.stat().st_size > 10_000 for path in tmp_path.iterdir())


def test_the_command_exits_with_1_if_a_law_is_broken(
    quick: verify.Verification, theory_command: Callable[[list[verify.Check]], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scalelong.theory.figures.draw_theory", lambda *arguments: [])  # Drawn by the test above.
    result = theory_command([replace(quick.checks[0], passed=False)])
    assert result.exit_code == 1
    assert "BROKEN" in result.stdout and "2 of 3 checks passed" in result.stdout
