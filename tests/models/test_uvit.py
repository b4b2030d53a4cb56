"""Laws of U-ViT: the names and the arithmetic of the public checkpoints, at any size, eager or compiled."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from scalelong.models import UViT
from scalelong.models.uvit import SHORT, Attention, Block, attend, timestep_embedding

NAMES_AT_DEPTH_2 = [
    "pos_embed",
    "patch_embed.proj.weight",
    "patch_embed.proj.bias",
    "in_blocks.0.norm1.weight",
    "in_blocks.0.norm1.bias",
    "in_blocks.0.attn.qkv.weight",
    "in_blocks.0.attn.proj.weight",
    "in_blocks.0.attn.proj.bias",
    "in_blocks.0.norm2.weight",
    "in_blocks.0.norm2.bias",
    "in_blocks.0.mlp.fc1.weight",
    "in_blocks.0.mlp.fc1.bias",
    "in_blocks.0.mlp.fc2.weight",
    "in_blocks.0.mlp.fc2.bias",
    "mid_block.norm1.weight",
    "mid_block.norm1.bias",
    "mid_block.attn.qkv.weight",
    "mid_block.attn.proj.weight",
    "mid_block.attn.proj.bias",
    "mid_block.norm2.weight",
    "mid_block.norm2.bias",
    "mid_block.mlp.fc1.weight",
    "mid_block.mlp.fc1.bias",
    "mid_block.mlp.fc2.weight",
    "mid_block.mlp.fc2.bias",
    "out_blocks.0.skip_linear.weight",
    "out_blocks.0.skip_linear.bias",
    "out_blocks.0.norm1.weight",
    "out_blocks.0.norm1.bias",
    "out_blocks.0.attn.qkv.weight",
    "out_blocks.0.attn.proj.weight",
    "out_blocks.0.attn.proj.bias",
    "out_blocks.0.norm2.weight",
    "out_blocks.0.norm2.bias",
    "out_blocks.0.mlp.fc1.weight",
    "out_blocks.0.mlp.fc1.bias",
    "out_blocks.0.mlp.fc2.weight",
    "out_blocks.0.mlp.fc2.bias",
    "norm.weight",
    "norm.bias",
    "decoder_pred.weight",
    "decoder_pred.bias",
    "final_layer.weight",
    "final_layer.bias",
]
TIME_MLP = ["time_embed.0.weight", "time_embed.0.bias", "time_embed.2.weight", "time_embed.2.bias"]
PARTS = ("in_blocks.0", "mid_block", "out_blocks.0")
QK_NORMS = [f"{part}.attn.{one}_norm.{end}" for part in PARTS for one in "qk" for end in ("weight", "bias")]
SKIP_NORM = ["out_blocks.0.skip_norm.weight", "out_blocks.0.skip_norm.bias"]
QKV_BIASES = ["in_blocks.0.attn.qkv.bias", "mid_block.attn.qkv.bias", "out_blocks.0.attn.qkv.bias"]

CONDITIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "label": {"num_classes": 10},
    "text": {"clip_dim": 12, "num_clip_token": 5},
    "label and text": {"num_classes": 10, "clip_dim": 12, "num_clip_token": 5},
}
every_condition = pytest.mark.parametrize("condition", CONDITIONS)


def tiny(condition: str = "none", **options: Any) -> UViT:
    """A UViT on 8×8 images whose every parameter is random, so that nothing hides behind a zero."""
    generator = torch.Generator().manual_seed(1)
    config: dict[str, Any] = {"embed_dim": 32, "depth": 4, "num_heads": 4} | CONDITIONS[condition] | options
    model = UViT(config.pop("img_size", 8), 2, **config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2, generator=generator)
    return model


def inputs_for(model: UViT, size: tuple[int, int] = (8, 8), batch: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    inputs = {"x": torch.randn(batch, model.in_chans, *size, generator=generator)}
    inputs["timesteps"] = torch.rand(batch, generator=generator) * 999
    if model.label_emb is not None:
        inputs["y"] = torch.arange(batch) + 3
    if model.context_shape is not None:
        inputs["context"] = torch.randn(batch, *model.context_shape, generator=generator)
    return inputs


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, NAMES_AT_DEPTH_2),
        ({"num_classes": 10}, [*NAMES_AT_DEPTH_2, "label_emb.weight"]),
        (CONDITIONS["text"], [*NAMES_AT_DEPTH_2, "context_embed.weight", "context_embed.bias"]),
        ({"mlp_time_embed": True}, [*NAMES_AT_DEPTH_2, *TIME_MLP]),
        ({"qkv_bias": True}, [*NAMES_AT_DEPTH_2, *QKV_BIASES]),
        ({"conv": False}, [name for name in NAMES_AT_DEPTH_2 if not name.startswith("final_layer")]),
        ({"qk_norm": True}, [*NAMES_AT_DEPTH_2, *QK_NORMS]),
        ({"skip_norm": True}, [*NAMES_AT_DEPTH_2, *SKIP_NORM]),
        ({"concat_balance": 0.3}, NAMES_AT_DEPTH_2),
    ],
    ids=["plain", "label", "text", "time MLP", "qkv bias", "no conv", "qk norm", "norm after the join", "balance"],
)
def test_parameters_carry_the_names_of_the_public_checkpoints(options: dict[str, Any], expected: list[str]) -> None:
    assert sorted(UViT(8, 2, embed_dim=32, depth=2, num_heads=4, **options).state_dict()) == sorted(expected)


def attention_by_hand(x: Tensor, weights: dict[str, Tensor], prefix: str, num_heads: int) -> Tensor:
    query, key, value = (x @ weights[f"{prefix}qkv.weight"].T).chunk(3, dim=-1)
    width = query.shape[-1] // num_heads
    heads = []
    for q, k, v in zip(query.split(width, -1), key.split(width, -1), value.split(width, -1), strict=True):
        heads.append(torch.softmax(q @ k.mT / math.sqrt(width), dim=-1) @ v)
    return torch.cat(heads, dim=-1) @ weights[f"{prefix}proj.weight"].T + weights[f"{prefix}proj.bias"]


def block_by_hand(x: Tensor, weights: dict[str, Tensor], prefix: str, num_heads: int) -> Tensor:
    def layer(kind: Callable[..., Tensor], name: str, *args: Any) -> Tensor:
        return kind(*args, weights[f"{prefix}{name}.weight"], weights[f"{prefix}{name}.bias"])

    x = x + attention_by_hand(layer(F.layer_norm, "norm1", x, x.shape[-1:]), weights, f"{prefix}attn.", num_heads)
    hidden = F.gelu(layer(F.linear, "mlp.fc1", layer(F.layer_norm, "norm2", x, x.shape[-1:])))
    return x + layer(F.linear, "mlp.fc2", hidden)


def uvit_by_hand(weights: dict[str, Tensor], inputs: dict[str, Tensor], *, patch: int, heads: int) -> Tensor:
    """The network of depth 4 from its weights alone, pixel by pixel at the end."""
    x = inputs["x"]
    batch, channels, height, width = x.shape
    dim = weights["pos_embed"].shape[-1]
    tokens = [timestep_embedding(inputs["timesteps"], dim)[:, None]]
    if "y" in inputs:
        tokens = [weights["label_emb.weight"][inputs["y"]][:, None], *tokens]
    if "context" in inputs:
        tokens.append(F.linear(inputs["context"], weights["context_embed.weight"], weights["context_embed.bias"]))
    kernel = weights["patch_embed.proj.weight"].flatten(1)
    extras = sum(token.shape[1] for token in tokens)
    for row in range(0, height, patch):
        for column in range(0, width, patch):
            pixels = x[:, :, row : row + patch, column : column + patch].flatten(1)
            tokens.append((pixels @ kernel.T + weights["patch_embed.proj.bias"])[:, None])
    h = torch.cat(tokens, dim=1) + weights["pos_embed"]

    first = block_by_hand(h, weights, "in_blocks.0.", heads)
    second = block_by_hand(first, weights, "in_blocks.1.", heads)
    h = block_by_hand(second, weights, "mid_block.", heads)
    for index, skip in enumerate([second, first]):
        name = f"out_blocks.{index}.skip_linear"
        h = torch.cat([h, skip], dim=-1) @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
        h = block_by_hand(h, weights, f"out_blocks.{index}.", heads)

    h = F.layer_norm(h, (dim,), weights["norm.weight"], weights["norm.bias"])
    patches = (h @ weights["decoder_pred.weight"].T + weights["decoder_pred.bias"])[:, extras:]
    image = torch.empty(batch, channels, height, width)
    for i in range(height):
        for j in range(width):
            token = (i // patch) * (width // patch) + j // patch
            start = ((i % patch) * patch + j % patch) * channels
            image[:, :, i, j] = patches[:, token, start : start + channels]
    return F.conv2d(image, weights["final_layer.weight"], weights["final_layer.bias"], padding=1)


@every_condition
@torch.no_grad()
def test_the_network_equals_its_definition_written_out_by_hand(condition: str) -> None:
    model = tiny(condition, img_size=(8, 6), in_chans=4)
    inputs = inputs_for(model, (8, 6))
    expected = uvit_by_hand(model.state_dict(), inputs, patch=2, heads=4)
    # Sums in another order: a few float32 ulps of outputs of size ~10.
    torch.testing.assert_close(model(**inputs), expected, rtol=1e-5, atol=2e-5)


@torch.no_grad()
def test_attention_is_softmax_attention() -> None:
    attention = Attention(32, 4)
    x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0))
    expected = attention_by_hand(x, attention.state_dict(), "", num_heads=4)
    torch.testing.assert_close(attention(x), expected, rtol=0, atol=1e-6)


class RecordedOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tokens", [9, SHORT + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_and_its_gradients_are_those_of_double_precision_but_for_rounding(
    dtype: torch.dtype, tokens: int
) -> None:
    exact = torch.randn(3, 2, 3, tokens, 8, dtype=torch.float64).to(dtype).double().requires_grad_()
    rounded = exact.detach().to(dtype).requires_grad_()
    upstream = torch.randn(2, 3, tokens, 8, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(*exact)
    with torch.autocast("cpu", enabled=dtype is torch.bfloat16):
        found = attend(rounded)
    expected.backward(upstream)
    found.backward(upstream.to(dtype))
    assert found.dtype == dtype
    # A few roundings of numbers of size 1 to 4.
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)
    assert rounded.grad is not None
    torch.testing.assert_close(rounded.grad.double(), exact.grad, rtol=0, atol=tolerance)


COPIES = {"clone", "copy_", "_to_copy", "contiguous"}


@torch.no_grad()
def test_attention_over_many_tokens_copies_nothing() -> None:
    attention = Attention(32, 4)
    with RecordedOps() as ops:
        attention(torch.randn(2, SHORT + 1, 32))
    assert not COPIES & set(ops.names), ops.names


def test_attention_under_autocast_copies_the_heads_and_not_the_scores() -> None:
    heads = torch.randn(2, 7, 3, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    with RecordedOps() as ops, torch.autocast("cpu"):
        attend(heads.permute(2, 0, 3, 1, 4)).sum()
    assert [name for name in ops.names if name in COPIES] == ["clone"], ops.names


@pytest.mark.parametrize("dim", [6, 7])
def test_timestep_embedding_is_cosines_then_sines_of_falling_frequencies(dim: int) -> None:
    for t, row in zip([0.0, 1.5, 999.0], timestep_embedding(torch.tensor([0.0, 1.5, 999.0]), dim), strict=True):
        angles = [t / 10_000 ** (j / 3) for j in range(3)]
        expected = [math.cos(a) for a in angles] + [math.sin(a) for a in angles] + [0.0] * (dim % 2)
        # float32 angles up to 999 carry an error of 3e-5.
        torch.testing.assert_close(row, torch.tensor(expected), rtol=0, atol=1e-4)


@every_condition
def test_the_output_has_the_shape_of_the_image(condition: str) -> None:
    model = tiny(condition, img_size=(8, 12))
    assert model(**inputs_for(model, (8, 12), batch=3)).shape == (3, 3, 8, 12)


@pytest.mark.parametrize(("condition", "extras"), [("none", 1), ("label", 2), ("text", 6), ("label and text", 7)])
def test_every_block_sees_one_token_per_condition_and_patch(condition: str, extras: int) -> None:
    model = tiny(condition)
    seen: list[torch.Size] = []
    for block in [*model.in_blocks, model.mid_block, *model.out_blocks]:
        block.register_forward_hook(lambda _, args, output: seen.extend([*(a.shape for a in args), output.shape]))
    model(**inputs_for(model))
    assert (model.extras, model.num_patches, model.num_tokens) == (extras, 16, extras + 16)
    assert set(seen) == {(2, extras + 16, 32)}


def test_positions_at_the_training_size_are_the_parameter_itself() -> None:
    model = tiny("text", img_size=(8, 6))
    assert model._positions((4, 3)) is model.pos_embed


@pytest.mark.parametrize("grid", [(6, 5), (2, 2), (3, 4)])
@torch.no_grad()
def test_interpolation_resizes_the_patch_positions_and_keeps_the_others(grid: tuple[int, int]) -> None:
    model = tiny("text", img_size=(8, 6))
    positions = model._positions(grid)
    image = model.pos_embed[0, model.extras :].reshape(4, 3, 32).permute(2, 0, 1)[None]
    expected = F.interpolate(image, size=grid, mode="bicubic")[0].permute(1, 2, 0).reshape(-1, 32)
    assert torch.equal(positions[:, : model.extras], model.pos_embed[:, : model.extras])
    assert torch.equal(positions[0, model.extras :], expected)


@torch.no_grad()
def test_interpolation_of_equal_positions_changes_nothing() -> None:
    model = tiny("label")
    model.pos_embed[:, model.extras :] = 0.5
    # The four weights of the cubic kernel sum to one up to rounding.
    torch.testing.assert_close(model._positions((7, 3))[:, model.extras :], torch.full((1, 21, 32), 0.5))


@every_condition
@pytest.mark.parametrize("size", [(8, 12), (4, 2), (16, 16)])
def test_any_size_divisible_by_the_patch_gives_an_image_of_that_size(condition: str, size: tuple[int, int]) -> None:
    model = tiny(condition)
    assert model(**inputs_for(model, size)).shape == (2, 3, *size)


def gradients(model: UViT, inputs: dict[str, Tensor], call: Callable[..., Tensor] | None = None) -> dict[str, Tensor]:
    model.zero_grad()
    (model if call is None else call)(**inputs).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_checkpointing_changes_neither_the_output_nor_a_gradient() -> None:
    model = tiny("label and text", mlp_time_embed=True)
    inputs = inputs_for(model)
    output, plain = model(**inputs), gradients(model, inputs)
    model.use_checkpoint = True
    checkpointed = gradients(model, inputs)
    assert torch.equal(model(**inputs), output)
    assert plain.keys() == checkpointed.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)


def test_hooks_of_a_block_fire_again_when_checkpointing_recomputes_it() -> None:
    model = tiny(use_checkpoint=True)
    calls: list[int] = []
    model.out_blocks[0].register_forward_pre_hook(lambda _, args: calls.append(len(args)))
    gradients(model, inputs_for(model))
    assert calls == [2, 2]


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"condition": "label and text"}, (8, 8)),
        ({"use_checkpoint": True}, (12, 4)),
        ({"qk_norm": True, "skip_norm": True, "concat_balance": 0.3}, (8, 8)),
    ],
    ids=["conditions", "checkpointing and interpolation", "norms and balance"],
)
def test_compiling_the_whole_graph_changes_neither_the_output_nor_a_gradient(
    options: dict[str, Any], size: tuple[int, int]
) -> None:
    model = tiny(depth=2, **options)
    inputs = inputs_for(model, size)
    output, eager = model(**inputs), gradients(model, inputs)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    # aot_eager decomposes some operators, which may round differently in the last bits.
    torch.testing.assert_close(compiled(**inputs), output, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients(model, inputs, call=compiled), eager, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_an_export_with_a_dynamic_batch_gives_the_eager_output() -> None:
    model = tiny("label and text").eval()
    inputs = inputs_for(model)
    batch = torch.export.Dim("batch", min=1, max=64)
    shapes = {name: {0: batch} for name in inputs}
    exported = torch.export.export(model, (), inputs, dynamic_shapes=shapes).module()
    larger = inputs_for(model, batch=5)
    torch.testing.assert_close(exported(**larger), model(**larger), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_half_precision_model_answers_in_half_precision_at_any_size() -> None:
    model = tiny("label", mlp_time_embed=True).bfloat16()
    inputs = inputs_for(model, (12, 8))
    inputs["x"] = inputs["x"].bfloat16()
    assert model(**inputs).dtype == torch.bfloat16


@torch.no_grad()
def test_autocast_does_not_round_the_time_token() -> None:
    model = tiny()
    inputs = inputs_for(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tokens = model._embed(inputs["x"], inputs["timesteps"], None, None)
    assert torch.equal(tokens[:, 0], timestep_embedding(inputs["timesteps"], 32))


@pytest.mark.parametrize("std", [0.02, 0.05])
def test_linear_weights_start_with_the_given_deviation_and_biases_at_zero(std: float) -> None:
    torch.manual_seed(0)
    model = UViT(8, 2, embed_dim=128, depth=2, num_heads=4, init_std=std)
    # 0.02 is the deviation of the positions, whatever the weights' is; 2176 draws know it to 5 % (3 sigma).
    assert model.pos_embed.std().item() == pytest.approx(0.02, rel=0.05)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            assert module.bias is None or not module.bias.any()
            # At least 1536 weights each: 3 sigma is 5.4 %.
            assert module.weight.std().item() == pytest.approx(std, rel=0.08)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embed_dim": 30, "num_heads": 4}, r"multiple of num_heads, got embed_dim=30, num_heads=4"),
        ({"depth": 3}, r"must be even and at least 2, got 3"),
        ({"depth": 0}, r"must be even and at least 2, got 0"),
        ({"img_size": (8, 9)}, r"8×9 cannot be cut into patches of 2×2.*multiples of 2"),
        ({"clip_dim": 12}, r"both clip_dim and num_clip_token, got clip_dim=12, num_clip_token=None"),
    ],
)
def test_an_impossible_architecture_says_what_is_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(**options)


@pytest.mark.parametrize(
    ("condition", "changes", "message"),
    [
        ("none", {"x": torch.zeros(2, 3, 8, 7)}, r"8×7 cannot be cut into patches of 2×2"),
        ("none", {"x": torch.zeros(2, 4, 8, 8)}, r"shape \(batch, 3, height, width\), got \(2, 4, 8, 8\)"),
        ("none", {"x": torch.zeros(3, 8, 8)}, r"shape \(batch, 3, height, width\), got \(3, 8, 8\)"),
        ("none", {"timesteps": torch.tensor(5.0)}, r"timesteps must have shape \(2,\).*got \(\).*expand"),
        ("none", {"y": torch.tensor([1, 2])}, r"takes no y: build it with num_classes="),
        ("label", {"y": None}, r"built with num_classes= and needs y, a tensor of shape \(2,\)"),
        ("label", {"y": torch.zeros(2, 1)}, r"y must have shape \(2,\), got \(2, 1\)"),
        ("none", {"context": torch.zeros(2, 5, 12)}, r"takes no context: build it with clip_dim="),
        ("text", {"context": None}, r"needs context, a tensor of shape \(2, 5, 12\)"),
        ("text", {"context": torch.zeros(2, 12, 5)}, r"context must have shape \(2, 5, 12\), got \(2, 12, 5\)"),
    ],
)
def test_a_wrong_input_says_what_was_expected(condition: str, changes: dict[str, Any], message: str) -> None:
    model = tiny(condition)
    with pytest.raises(ValueError, match=message):
        model(**(inputs_for(model) | changes))


def test_a_joining_block_refuses_to_run_without_its_skip() -> None:
    block = Block(8, 2, mlp_ratio=4.0, qkv_bias=False, skip=True)
    with pytest.raises(ValueError, match=r"block\(x, skip\)"):
        block(torch.zeros(1, 3, 8))
