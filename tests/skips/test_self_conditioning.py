"""Self-conditioning: the same function at the start, one line to add and one to undo, and wherever the model goes."""

from __future__ import annotations

import copy
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from families.small import images, uvit
from families.zoo_diffusers import sample_at, unet_2d, unet_condition
from scalelong import (
    METHODS,
    condition_on_self,
    from_pretrained,
    fuse_skips,
    save_pretrained,
    scale_blocks,
    scale_skips,
    uncondition_on_self,
    unscale_skips,
)
from scalelong.theory.unet import TheoryUNet

pytestmark = pytest.mark.filterwarnings("ignore::scalelong.AbsorbedScalingWarning")

LEVELS = {"down": ["DownBlock2D", "AttnDownBlock2D"], "up": ["AttnUpBlock2D", "UpBlock2D"]}
TEXT_LEVELS = {"down": ["DownBlock2D", "CrossAttnDownBlock2D"], "up": ["CrossAttnUpBlock2D", "UpBlock2D"]}
KINDS: dict[str, Callable[[], nn.Module]] = {
    "uvit": uvit,
    "uvit with labels": lambda: uvit(num_classes=3),
    "uvit, recomputed": lambda: uvit(use_checkpoint=True),
    "unet": lambda: unet_2d(**LEVELS),
    "unet, scale and shift": lambda: unet_2d(**LEVELS, resnet_time_scale_shift="scale_shift"),
    "text unet": lambda: unet_condition(**TEXT_LEVELS),
}
networks = pytest.mark.parametrize("kind", KINDS)
few = pytest.mark.parametrize("kind", ["uvit", "unet", "text unet"])


def build(kind: str, trained: bool = False) -> nn.Module:
    """A network in eval mode; `trained` means that it is guided, by an MLP that has left its start."""
    torch.manual_seed(0)
    model = KINDS[kind]().eval()
    return train(condition_on_self(model)) if trained else model


def train(model: nn.Module) -> nn.Module:
    nn.init.normal_(model.get_parameter("self_conditioning.last.weight"), generator=torch.Generator().manual_seed(1))
    return model


def run(model: Any, kind: str, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    if kind.startswith("uvit"):
        return model(*images(), y=torch.tensor([0, 2])) if "labels" in kind else model(*images())
    inputs = sample_at(3 if kind.startswith("unet") else 4)
    return model(**inputs, **({"encoder_hidden_states": torch.randn(2, 5, 8)} if "text" in kind else {})).sample


@networks
def test_the_network_computes_the_same_at_the_start_and_after_the_undo(kind: str) -> None:
    model = build(kind)
    before, names = run(model, kind), list(model.state_dict())
    assert condition_on_self(model) is model
    assert torch.equal(run(model, kind), before)
    assert not torch.equal(run(train(model), kind), before)
    assert uncondition_on_self(model) is model
    assert torch.equal(run(model, kind), before)
    assert list(model.state_dict()) == names
    assert torch.equal(run(uncondition_on_self(model), kind), before)


def test_every_decoder_block_of_a_uvit_gets_the_guide_once() -> None:
    model, given = build("uvit"), {}
    for name in ("mid_block", *(f"out_blocks.{number}" for number in range(3))):
        hook = lambda module, args, name=name: given.__setitem__(name, args[0])  # noqa: E731
        model.get_submodule(name).register_forward_pre_hook(hook)
    block = model.out_blocks[0]
    run(model, "uvit")
    before = dict(given)
    condition_on_self(model).self_conditioning.last.bias.data.fill_(0.5)
    run(model, "uvit")
    assert torch.equal(given["mid_block"], before["mid_block"])
    assert torch.equal(given["out_blocks.0"], before["out_blocks.0"] + 0.5)
    skip = torch.zeros_like(given["out_blocks.0"])
    # Called by itself a block hands on what it computes: there is no middle block whose guide it could add.
    assert torch.equal(block(skip, skip), uncondition_on_self(model).out_blocks[0](skip, skip))


def test_the_up_blocks_get_the_time_embedding_with_the_guide_and_the_down_blocks_without(monkeypatch: Any) -> None:
    model, given = build("unet"), []
    for block in (*model.down_blocks, *model.up_blocks):
        for resnet in block.resnets:
            resnet.register_forward_pre_hook(lambda module, args: given.append(args[1]))
    run(model, "unet")
    before, down = list(given), sum(len(block.resnets) for block in model.down_blocks)
    given.clear()
    condition_on_self(model).self_conditioning.last.bias.data.fill_(0.5)
    run(model, "unet")
    assert all(torch.equal(one, other) for one, other in zip(given[:down], before[:down], strict=True))
    assert all(torch.equal(one, other + 0.5) for one, other in zip(given[down:], before[down:], strict=True))


@networks
def test_the_mlp_learns_from_its_start(kind: str) -> None:
    model = condition_on_self(build(kind))
    run(model, kind).square().mean().backward()
    last, hidden = (model.get_parameter(f"self_conditioning.{name}.weight") for name in ("last", "hidden"))
    assert last.grad.abs().sum() > 0 and hidden.grad.abs().sum() == 0
    torch.optim.SGD([last], lr=1.0).step()
    run(model, kind).square().mean().backward()
    assert hidden.grad.abs().sum() > 0


def test_recomputed_activations_give_the_same_gradients_of_several_passes_at_once() -> None:
    model = build("uvit", trained=True)
    other = copy.deepcopy(model)
    other.use_checkpoint = True
    for each in (model, other):
        (run(each, "uvit").square().sum() + 3 * run(each, "uvit", seed=1).square().sum()).backward()
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad), name


@pytest.mark.parametrize("method", [name for name in METHODS if name != "none"])
@few
def test_scaling_and_conditioning_commute_and_each_is_undone_alone(kind: str, method: str) -> None:
    guided = build(kind, trained=True)
    state, expected = guided.get_submodule("self_conditioning").state_dict(), run(guided, kind)
    one, other = guided, build(kind)
    for model in (one, other):
        torch.manual_seed(2)
        scale_skips(model, method)
    condition_on_self(other)
    other.get_submodule("self_conditioning").load_state_dict(state)
    assert torch.equal(run(one, kind), run(other, kind))
    assert torch.equal(run(unscale_skips(one), kind), expected)
    assert torch.equal(run(unscale_skips(other), kind), expected)


def test_constants_are_folded_into_the_weights_of_a_guided_network() -> None:
    model = scale_blocks(scale_skips(build("uvit", trained=True), "cs", kappa=0.5), "stable", tau=0.3)
    before = run(model, "uvit")
    # 1e-5: the skip is multiplied after the weights instead of before.
    torch.testing.assert_close(run(fuse_skips(model), "uvit"), before, rtol=0, atol=1e-5)
    assert hasattr(model, "self_conditioning")


@few
def test_copies_and_pickles_are_guided_by_their_own_mlp(kind: str) -> None:
    model = build(kind, trained=True)
    expected = run(model, kind)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for other in (copy.deepcopy(model), torch.load(stored, weights_only=False)):
        assert torch.equal(run(other, kind), expected)
        nn.init.zeros_(other.self_conditioning.last.weight)
        assert torch.equal(run(other, kind), run(uncondition_on_self(other), kind))
        assert torch.equal(run(model, kind), expected)


def test_a_state_dict_fits_networks_that_are_guided_too_and_no_others() -> None:
    model = build("uvit", trained=True)
    twin = condition_on_self(build("uvit"))
    twin.load_state_dict(model.state_dict())
    assert torch.equal(run(twin, "uvit"), run(model, "uvit"))
    with pytest.raises(RuntimeError, match=r"Unexpected key.*self_conditioning\.norm\.weight"):
        build("uvit").load_state_dict(model.state_dict())


def test_conditioning_again_begins_anew_and_hooks_once() -> None:
    model = condition_on_self(build("uvit", trained=True))
    assert torch.equal(run(model, "uvit"), run(build("uvit"), "uvit"))
    assert len(model.mid_block._forward_hooks) == 1


def test_a_network_inside_a_wrapper_is_found() -> None:
    wrapper = nn.ModuleDict({"net": build("unet")})
    condition_on_self(wrapper)
    assert hasattr(wrapper["net"], "self_conditioning")
    assert not hasattr(uncondition_on_self(wrapper)["net"], "self_conditioning")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_mlp_follows_precision_device_and_mode_of_the_network(device: str) -> None:
    model = condition_on_self(uvit().to(device, torch.bfloat16))
    last = model.get_parameter("self_conditioning.last.weight")
    assert (last.dtype, last.device.type, model.self_conditioning.training) == (torch.bfloat16, device, False)
    x, t = images()
    assert model(x.to(device, torch.bfloat16), t.to(device)).dtype == torch.bfloat16


def test_under_autocast_the_tokens_keep_their_precision() -> None:
    model = build("uvit", trained=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(model, "uvit")
    torch.testing.assert_close(found.float(), run(model, "uvit"), rtol=0.05, atol=0.05)  # bf16 has three digits


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("kind", ["uvit", pytest.param("unet", marks=pytest.mark.slow)])
def test_a_guided_network_compiles_to_one_graph(kind: str) -> None:
    torch._dynamo.reset()
    model = build(kind, trained=True)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    # 1e-5: sums in another order.
    torch.testing.assert_close(run(compiled, kind), run(model, kind), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"already wrapped by torch\.compile.*or condition it"):
        condition_on_self(compiled)


@few
def test_a_saved_network_is_loaded_with_its_guide_and_refused_by_others(kind: str, tmp_path: Path) -> None:
    model = build(kind, trained=True)
    source = uvit if kind == "uvit" else type(model)
    save_pretrained(model, tmp_path / "guided")
    assert torch.equal(run(from_pretrained(source, tmp_path / "guided"), kind), run(model, kind))
    save_pretrained(scale_skips(model, "ls"), tmp_path / "both")
    assert torch.equal(run(from_pretrained(source, tmp_path / "both"), kind), run(model, kind))
    with pytest.raises(ValueError, match="conditioned on itself cannot be folded"):
        save_pretrained(unscale_skips(model), tmp_path / "fused", fuse=True)
    if kind != "uvit":
        with pytest.raises(ValueError, match=r"changed by scalelong \(see its README\.md\)"):
            source.from_pretrained(tmp_path / "guided")
        model.save_pretrained(tmp_path / "theirs")
        with pytest.raises(
            ValueError, match=r"nothing says how it was changed: save the network with scalelong\.save_pre"
        ):
            from_pretrained(source, tmp_path / "theirs")


def test_networks_without_a_known_bottleneck_are_refused_in_one_line() -> None:
    without_middle = unet_condition(["DownBlock2D"], ["UpBlock2D"], mid_block_type=None)
    for model in (TheoryUNet(8, 2), without_middle, nn.Linear(1, 1)):
        with pytest.raises(ValueError, match=f"^{type(model).__name__} has no bottleneck that is known: .*") as caught:
            condition_on_self(model)
        assert "\n" not in str(caught.value)
    taken = build("uvit")
    taken.self_conditioning = nn.Identity()
    with pytest.raises(ValueError, match="already has an attribute 'self_conditioning' of its own"):
        condition_on_self(taken)
    assert isinstance(uncondition_on_self(taken).self_conditioning, nn.Identity)


def test_recomputing_a_whole_up_block_is_refused_instead_of_forgetting_the_guide() -> None:
    model = build("unet", trained=True)
    inputs = {}
    model.up_blocks[0].register_forward_pre_hook(
        lambda module, args, kwargs: inputs.update(args=args, kwargs=kwargs), with_kwargs=True, prepend=True
    )
    run(model, "unet")
    with pytest.raises(RuntimeError, match="was called without the middle block before it"):
        model.up_blocks[0](*inputs["args"], **inputs["kwargs"])


@few
def test_it_adds_little_work(kind: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    def work(model: nn.Module) -> int:
        with FlopCounterMode(display=False) as counter:
            run(model, kind)
        return counter.get_total_flops()

    model = build(kind)
    plain = work(model)
    assert plain < work(condition_on_self(model)) <= 1.02 * plain
