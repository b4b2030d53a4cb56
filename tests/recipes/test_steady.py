"""Steady layers: what is computed without gradients does not depend on the number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scalelong import scale_skips
from scalelong.models import UViT
from scalelong.models.uvit import MLP
from scalelong.recipes import Config, build_model, load_recipe
from scalelong.recipes.layout import for_drawing, lay_out
from scalelong.recipes.steady import STEADY, make_steady
from scalelong.recipes.steady.layers import CAN_PACK, NormedSiLU, SteadyConv2d, SteadyLinear, shared_evenly
from scalelong.recipes.steady.uvit import SteadyBlock
from scalelong.training.cpu import take_cpu_layers

SIZE = ("model.block_out_channels=[32, 64]", "model.depth=1", "model.attention=[16]")
RECIPES = {
    "unet with whole planes": ("cifar10-tiny-unet", *SIZE, "training.channels_last=false"),
    "unet with its channels last": ("cifar10-tiny-unet", *SIZE, "training.channels_last=true"),
    "text unet": ("flickr-tiny-unet", *SIZE, "training.channels_last=true"),
    "uvit": ("cifar10-tiny-uvit", "model.embed_dim=64", "model.depth=2"),
}

LAYERS: dict[str, tuple[nn.Module, Tensor]] = {
    "kernels of one pixel": (nn.Conv2d(96, 32, 1), torch.randn(3, 96, 32, 32)),
    "convolution of one small image": (nn.Conv2d(32, 48, 3, padding=1), torch.randn(1, 32, 8, 8)),
    "convolution with strides": (nn.Conv2d(37, 64, 3, stride=2), torch.randn(5, 37, 33, 33)),
    "convolution in groups": (nn.Conv2d(32, 32, 3, padding=1, groups=4), torch.randn(3, 32, 16, 16)),
    "convolution of a ring": (nn.Conv2d(8, 16, 3, padding=1, padding_mode="circular"), torch.randn(3, 8, 16, 16)),
    "convolution of the same size": (nn.Conv2d(8, 16, 3, padding="same", bias=False), torch.randn(3, 8, 16, 16)),
    "few rows": (nn.Linear(128, 256), torch.randn(5, 128)),
    "large products": (nn.Linear(384, 256), torch.randn(3, 77, 384)),
    "long sums": (nn.Linear(2048, 512), torch.randn(2056, 2048)),
    "mlp": (MLP(128, 512), torch.randn(3, 77, 128)),
    "norm": (nn.GroupNorm(8, 32), torch.randn(1, 32, 32, 32).to(memory_format=torch.channels_last)),
    "norm of few pixels": (nn.GroupNorm(16, 32), torch.randn(3, 32, 8, 8).to(memory_format=torch.channels_last)),
    "norm of few channels": (nn.GroupNorm(29, 87), torch.randn(19, 87, 15, 17).to(memory_format=torch.channels_last)),
    "norm before attention": (nn.GroupNorm(16, 48), torch.randn(9, 16 * 15, 48).mT),
    "silu": (nn.SiLU(), torch.randn(7, 37, 31, 31)),
    "silu with its channels last": (nn.SiLU(), torch.randn(7, 37, 31, 31).to(memory_format=torch.channels_last)),
    "silu with gaps": (nn.SiLU(), torch.randn(2, 300, 320)[..., :300]),
}


packs = pytest.mark.skipif(not CAN_PACK, reason="weights are packed by oneDNN on x86 alone")


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def with_threads(compute: Callable[[], Tensor]) -> list[Tensor]:
    """What is computed with 1, 2, 3, 4 and 8 threads."""
    found = []
    for threads in (1, 2, 3, 4, 8):
        torch.set_num_threads(threads)
        with torch.no_grad():
            found.append(compute())
    return found


def is_same(found: list[Tensor]) -> bool:
    return all(torch.equal(found[0], other) for other in found[1:])


def drawn(network: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """What a network gives while images are drawn; its weights are packed by the threads that there are now."""
    with torch.no_grad(), for_drawing(network):
        return read(network(*args, **kwargs))


def network_and_inputs(config: Config, batch: int) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(batch)
    network = lay_out(build_model(config).eval(), config.training)
    inputs = {"sample" if config.model.kind == "unet" else "x": torch.randn(batch, 3, 32, 32)}
    inputs["timestep" if config.model.kind == "unet" else "timesteps"] = torch.randint(0, 1000, (batch,))
    if config.labels is not None:
        labels = torch.randint(0, config.labels.embeddings, (batch,))
        inputs["class_labels" if config.model.kind == "unet" else "y"] = labels
    if config.text is not None:
        inputs["encoder_hidden_states"] = torch.randn(batch, config.text.max_length, config.text.width)
    return network, inputs


def read(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.sample


@pytest.mark.parametrize("batch", [1, 5, 16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_output_of_a_network_does_not_depend_on_the_number_of_threads(recipe: str, batch: int) -> None:
    name, *overrides = RECIPES[recipe]
    network, inputs = network_and_inputs(load_recipe(name, overrides), batch)
    assert is_same(with_threads(lambda: drawn(network, **inputs)))


@packs
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_network_that_is_drawn_from_computes_what_it_did(recipe: str) -> None:
    name, *overrides = RECIPES[recipe]
    config = load_recipe(name, overrides)
    network, inputs = network_and_inputs(config, 16)
    plain = build_model(config).eval()
    plain.load_state_dict(network.state_dict())
    with torch.no_grad(), for_drawing(network):
        found = read(network(**inputs))
        assert any(linear.packed is not None for linear in network.modules() if isinstance(linear, SteadyLinear))
    # Another order of adding in every layer.
    torch.testing.assert_close(found, read(plain(**inputs)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_network_is_compiled_in_one_piece(recipe: str, trains: bool) -> None:
    name, *overrides = RECIPES[recipe]
    network, inputs = network_and_inputs(load_recipe(name, overrides), 2)
    torch.compiler.reset()
    if trains:
        take_cpu_layers(network.train(), torch.device("cpu"))
    compiled = torch.compile(network, fullgraph=True, backend="eager")
    if trains:
        assert compiled(**inputs) is not None  # It raises where it breaks off; dropout draws other numbers each time.
        return
    with torch.no_grad(), for_drawing(network):
        torch.testing.assert_close(read(compiled(**inputs)), read(network(**inputs)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_that_depends_on_the_number_of_threads_is_made_steady(layer: str) -> None:
    module, x = LAYERS[layer]
    steady = make_steady(nn.Sequential(module))
    assert is_same(with_threads(lambda: drawn(steady, x)))


@pytest.mark.parametrize("layer", LAYERS)
def test_a_steady_layer_computes_what_it_did_and_with_gradients_to_the_bit(layer: str) -> None:
    module, x = LAYERS[layer]
    plain = next(kind for kind in type(module).__mro__ if kind in STEADY)
    make_steady(nn.Sequential(module))
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert torch.equal(module(x), plain.forward(module, x))
        with torch.no_grad():
            expected = plain.forward(module, x)
            with for_drawing(module):
                found = module(x)
        # Another order of adding: a few roundings of numbers around one.
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        if isinstance(module, nn.Conv2d):
            assert found.is_contiguous(memory_format=torch.channels_last)
        elif x.is_contiguous() and x.shape == found.shape:
            assert found.is_contiguous()


@packs
def test_a_packed_weight_is_kept_only_while_images_are_drawn() -> None:
    (linear,), x = make_steady(nn.Sequential(nn.Linear(384, 256, bias=False))), torch.ones(3, 77, 384)
    assert isinstance(linear, SteadyLinear)
    for scale in (1.0, 2.0):
        with torch.no_grad(), for_drawing(linear):
            linear.weight.fill_(scale)
            linear(x[:1, :1])
            assert linear.packed is None
            assert torch.equal(linear(x), torch.full((3, 77, 256), 384 * scale))
            assert linear.packed is not None
        assert linear.packed is None and not linear.draws
    assert list(linear.state_dict()) == ["weight"]


LARGE = (torch.randn(32, 3, 32, 32), torch.arange(32))


def uvit() -> UViT:
    """Large enough for every linear layer of a block to be packed for 32 images."""
    torch.manual_seed(0)
    return UViT(32, 4, embed_dim=96, depth=2, num_heads=4).eval()


def calls_of(network: nn.Module, inputs: tuple[Tensor, ...] = LARGE) -> int:
    """How often a linear layer inside a block is called as a module while the network draws."""
    blocks = [block for block in network.modules() if isinstance(block, SteadyBlock)]
    called = []
    handles = [block.attn.proj.register_forward_hook(lambda *_: called.append(1)) for block in blocks]
    with torch.no_grad():
        network(*inputs)
    for handle in handles:
        handle.remove()
    return len(called)


@packs
def test_a_block_that_draws_computes_what_its_modules_do_with_any_number_of_threads() -> None:
    network = make_steady(scale_skips(uvit(), "ls"))
    with torch.no_grad():
        expected = network(*LARGE)
        with for_drawing(network):
            assert calls_of(network) == 0  # Hooks that come later are too late: nobody calls the modules.
    found = with_threads(lambda: drawn(network, *LARGE))
    assert is_same(found)
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)


@packs
def test_a_block_with_a_hook_calls_its_modules_while_it_draws() -> None:
    network, seen = make_steady(uvit()), []
    network.mid_block.mlp.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad(), for_drawing(network):
        network(*LARGE)
        assert len(seen) == 1 and calls_of(network) == 1


def test_blocks_call_their_modules_for_few_tokens_with_gradients_and_after_drawing() -> None:
    network = make_steady(uvit())
    with for_drawing(network):
        assert calls_of(network, tuple(part[:1] for part in LARGE)) == 3
        found = network(*LARGE)
        assert torch.equal(found, uvit()(*LARGE)) and found.requires_grad
    assert calls_of(network) == 3


def test_a_block_of_layers_that_are_something_else_calls_them_while_it_draws() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    network = uvit()
    for module in network.modules():
        module.__class__ = Doubled if type(module) is nn.Linear else type(module)
    with torch.no_grad():
        expected = network(*LARGE)
    torch.testing.assert_close(drawn(make_steady(network), *LARGE), expected, rtol=1e-4, atol=1e-4)


def test_a_block_that_draws_still_asks_for_its_skip() -> None:
    network = make_steady(uvit())
    with torch.no_grad(), for_drawing(network), pytest.raises(ValueError, match="joins a long skip connection"):
        network.out_blocks[0](torch.randn(32, 65, 96))


@packs
def test_drawing_inside_of_drawing_packs_nothing_again_and_ends_with_the_outer_one() -> None:
    network = make_steady(uvit())
    linears = [module for module in network.modules() if isinstance(module, SteadyLinear)]
    with torch.no_grad(), for_drawing(network):
        network(*LARGE)
        packed = [linear.packed for linear in linears]
        assert any(weight is not None for weight in packed)
        with for_drawing(network):
            network(*LARGE)
        assert all(linear.packed is weight for linear, weight in zip(linears, packed, strict=True))
        assert calls_of(network) == 0
    assert all(linear.packed is None and not linear.draws for linear in linears)


def test_the_activation_of_a_residual_block_overwrites_images_and_no_times() -> None:
    from diffusers.models.resnet import ResnetBlock2D

    block = ResnetBlock2D(in_channels=32, temb_channels=8, groups=8)
    activation = make_steady(block).nonlinearity
    assert type(activation) is NormedSiLU
    images, times = torch.randn(2, 32, 8, 8), torch.randn(2, 8)
    with torch.no_grad():
        assert activation(images).data_ptr() == images.data_ptr()
        assert activation(times).data_ptr() != times.data_ptr()
    kept = images.clone().requires_grad_()
    activation(kept).sum().backward()
    assert torch.equal(kept, images) and kept.grad is not None


IMAGES = torch.randn(5, 32, 16, 16).to(memory_format=torch.channels_last)
TIMES = torch.randn(5, 24)


def resnet(**options: Any) -> nn.Module:
    """A residual block of diffusers, and its numbers are never nothing."""
    from diffusers.models.resnet import ResnetBlock2D

    torch.manual_seed(0)
    block = ResnetBlock2D(**{"in_channels": 32, "temb_channels": 24, "groups": 8, **options})  # pyright: ignore
    for weight in block.parameters():
        nn.init.normal_(weight, std=0.2)
    return make_steady(block).eval()


@pytest.mark.parametrize(
    ("options", "draws"),
    [
        ({}, True),
        ({"out_channels": 48}, True),
        ({"skip_time_act": True}, True),
        ({"dropout": 0.5}, True),
        ({"up": True}, False),
        ({"down": True}, False),
        ({"time_embedding_norm": "scale_shift"}, False),
        ({"output_scale_factor": 2.0}, False),
    ],
)
@packs
def test_a_residual_block_that_draws_computes_what_it_did_and_overwrites_nothing(options: Any, draws: bool) -> None:
    block, images, times = resnet(**options), IMAGES.clone(memory_format=torch.preserve_format), TIMES.clone()
    expected = type(block).__mro__[2].forward(block, images, times)  # That of diffusers.
    assert torch.equal(block(images, times), expected) and expected.requires_grad
    with torch.no_grad(), for_drawing(block):
        assert block.draws is draws
        found = block(images, times)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-4)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images, IMAGES) and torch.equal(times, TIMES)
    assert not block.draws and is_same(with_threads(lambda: drawn(block, images, times)))


@packs
def test_images_as_planes_or_with_gaps_are_residuals_as_well() -> None:
    block = resnet()
    wide = torch.cat([IMAGES, IMAGES], dim=1)
    expected = drawn(block, IMAGES, TIMES)
    for images in (IMAGES.contiguous(), wide[:, :32], wide.contiguous()[:, :32]):
        torch.testing.assert_close(drawn(block, images, TIMES), expected, rtol=1e-4, atol=1e-4)


@packs
@pytest.mark.parametrize("name", ["conv1", "conv2", "conv_shortcut", "dropout"])
def test_a_residual_block_with_a_hook_calls_its_modules_while_it_draws(name: str) -> None:
    block, seen = resnet(out_channels=48), []
    block.get_submodule(name).register_forward_hook(lambda *_: seen.append(1))
    with for_drawing(block):
        assert not block.draws
    drawn(block, IMAGES, TIMES)
    assert len(seen) == 1


def test_a_residual_block_that_drops_numbers_goes_on_to_do_so() -> None:
    with for_drawing(block := resnet(dropout=0.5).train()):
        assert not block.draws


@pytest.mark.parametrize("last", [True, False])
def test_the_attention_of_a_unet_returns_images_in_the_layout_that_it_gets(last: bool) -> None:
    from diffusers.models.attention_processor import Attention

    layout = torch.channels_last if last else torch.contiguous_format
    options = {"query_dim": 32, "heads": 4, "dim_head": 8, "norm_num_groups": 8, "residual_connection": True}
    layer = Attention(**options, bias=True)  # pyright: ignore[reportArgumentType]
    images = IMAGES.contiguous(memory_format=layout)
    expected = layer(images)
    found = make_steady(nn.Sequential(layer))(images)
    torch.testing.assert_close(found, expected)
    assert found.is_contiguous(memory_format=layout)
    assert is_same(with_threads(lambda: drawn(layer, images)))


@packs
def test_the_weight_of_a_convolution_is_packed_for_all_sizes_until_images_are_drawn() -> None:
    (layer,) = make_steady(nn.Sequential(nn.Conv2d(32, 16, 3, padding=1)))
    assert isinstance(layer, SteadyConv2d)
    for scale in (1.0, 3.0):
        with torch.no_grad(), for_drawing(layer):
            layer.weight.fill_(scale)
            for images in (IMAGES, IMAGES[:1], torch.randn(2, 32, 40, 24)):
                expected = nn.Conv2d.forward(layer, images)
                torch.testing.assert_close(layer(images), expected, rtol=1e-4, atol=1e-3)
            assert layer.packed is not None
        assert layer.packed is None and not layer.draws
    assert list(layer.state_dict()) == ["weight", "bias"]


def test_groups_far_from_zero_are_normed_as_precisely_as_torch_does() -> None:
    norm, images = nn.GroupNorm(16, 32), IMAGES + 100
    make_steady(nn.Sequential(norm))
    with torch.no_grad():
        exact = nn.functional.group_norm(images.double(), 16)
        assert (norm(images) - exact).abs().max() <= 2 * (nn.GroupNorm.forward(norm, images) - exact).abs().max()


@pytest.mark.parametrize("threads", range(1, 9))
def test_all_threads_get_whole_vectors_and_one_takes_the_rest(threads: int) -> None:
    for count in (1, 32_767, 32_769, 65_537, 100_000, 98_305, 1_000_003):
        whole = shared_evenly(count, threads)
        parts = min(threads, -(-whole // 32_768))
        assert 0 <= count - whole < 32_768
        assert parts == 1 or (whole % parts == 0 and whole // parts % 64 == 0)
