"""The UNet of the paper's analysis (Eq. 3), fully connected with added skips: one as a module, and many at once.

Of many, every matrix is a batch of independent samples, multiplied in one product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Generator, Tensor, nn

# Numbers in one batch of networks: large enough for fast products, small enough for any machine.
BATCH_NUMBERS = 2**23

Record = tuple[int, Tensor, Tensor]
"""Of one matrix the block it belongs to, from 0 (a_1 and b_1) to N (the middle), its input and its output."""


class Decoder(nn.Module):
    """b_i: a block applied to the sum of the long skip and what comes from below. Shape: (B, m), (B, m) → (B, m)."""

    def __init__(self, mlp: nn.Sequential) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.mlp(skip + x)


class TheoryUNet(nn.Module):
    """UNet(x) = f_0(x), with f_i(x) = b_{i+1}(a_{i+1}(x) + f_{i+1}(a_{i+1}(x))) for i < N (Eq. 3, every κ = 1).

    The encoders a_i, the middle block f_N and the decoders b_i are MLPs W_l σ(W_{l−1} … σ(W_1 x)) without biases,
    σ = ReLU, W ∈ R^{m×m} with entries from N(0, 2/m). `encoders[i]` is a_{i+1} and `decoders[i]` is b_{i+1}:
    item 0 belongs to the outermost skip. Shape: (B, m) → (B, m), m = width, N = num_skips, l = block_depth.

    >>> model = TheoryUNet(8, 3, generator=torch.Generator().manual_seed(0))
    >>> model(torch.ones(2, 8)).shape
    torch.Size([2, 8])
    """

    def __init__(self, width: int, num_skips: int, *, block_depth: int = 2, generator: Generator | None = None) -> None:
        super().__init__()
        for name, size in {"width": width, "num_skips": num_skips, "block_depth": block_depth}.items():
            if size < 1:
                raise ValueError(f"TheoryUNet needs {name} of at least 1, got {size}")
        self.width, self.num_skips = width, num_skips
        self.encoders = nn.ModuleList(kaiming_mlp(width, block_depth, generator) for _ in range(num_skips))
        self.middle = kaiming_mlp(width, block_depth, generator)
        self.decoders = nn.ModuleList(Decoder(kaiming_mlp(width, block_depth, generator)) for _ in range(num_skips))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for encoder in self.encoders:
            x = encoder(x)
            skips.append(x)
        x = self.middle(x)
        for decoder in reversed(self.decoders):
            x = decoder(x, skips.pop())
        return x


def kaiming_mlp(width: int, depth: int, generator: Generator | None) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(depth):
        # nn.Linear's own initialisation would move the global generator, even for a caller who passes another.
        linear = nn.Linear(width, width, bias=False, device="meta").to_empty(device=torch.get_default_device())
        nn.init.normal_(linear.weight, std=math.sqrt(2 / width), generator=generator)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def sample_networks(count: int, width: int, num_skips: int, *, block_depth: int = 2, generator: Generator) -> Tensor:
    """The matrices of so many `TheoryUNet`. Shape: (2N+1, block_depth, count, m, m).

    First the encoders, item 0 is outermost, then the middle, then the decoders, again the outermost first.
    """
    shape = (2 * num_skips + 1, block_depth, count, width, width)
    return torch.empty(shape).normal_(std=math.sqrt(2 / width), generator=generator)


def sample_batches(count: int, width: int, num_skips: int, generator: Generator) -> Iterator[Tensor]:
    """So many networks of blocks with two matrices, in batches that fit in memory."""
    size = max(1, BATCH_NUMBERS // (width**2 * 2 * (2 * num_skips + 1)))
    for start in range(0, count, size):
        yield sample_networks(min(size, count - start), width, num_skips, generator=generator)


def unit_inputs(networks: Tensor, generator: Generator) -> Tensor:
    """A random direction for each network. Shape: (networks, m, 1)."""
    x = torch.randn(networks.shape[2], networks.shape[-1], 1, generator=generator)
    return x / x.norm(dim=1, keepdim=True)


def forward(
    networks: Tensor, x: Tensor, kappas: Tensor, scale: Tensor | float = 1.0, records: list[Record] | None = None
) -> list[Tensor]:
    """h_0 … h_N for K settings at once, every block's output multiplied by `scale`: √½ gives Kaiming's blocks gain 1.

    What every matrix does is added to `records`. Shape: x (networks, m, 1 or K), kappas (N, K), scale (K,) → N+1 times
    (networks, m, K).
    """
    count, skips = len(networks) // 2, []

    def apply(block: Tensor, index: int, x: Tensor) -> Tensor:
        for position, matrix in enumerate(block):
            read = x.relu() if position else x
            x = matrix @ read
            if records is not None:
                records.append((index, read, x))
        return x * scale

    for index in range(count):
        x = apply(networks[index], index, x)
        skips.append(x)
    features = [apply(networks[count], count, x)]
    for index in reversed(range(count)):
        joined = kappas[index] * skips[index] + features[-1]
        features.append(apply(networks[count + 1 + index], index, joined))
    return features[::-1]


def feature_norms(networks: Tensor, kappas: Tensor, generator: Generator, scale: Tensor | float = 1.0) -> Tensor:
    """‖h_i‖²/‖x‖² of every network. Shape: kappas (N, K) → (networks, N+1, K), float64."""
    features = forward(networks, unit_inputs(networks, generator), kappas, scale)
    return torch.stack([h.double().square().sum(1).expand(-1, kappas.shape[1]) for h in features], dim=1)


def gradient_norms(networks: Tensor, kappas: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
    """The two norms of `matrix_norms`, each the mean over a block's matrices; the last block is the middle.

    Shape: kappas (N, 1) → (networks, N+1), float64, twice.
    """
    blocks, *norms = matrix_norms(networks, kappas, generator)
    members = [[place for place, block in enumerate(blocks) if block == index] for index in sorted(set(blocks))]
    independent, denoising = (torch.stack([norm[:, own].mean(1) for own in members], dim=1) for norm in norms)
    return independent, denoising


def matrix_norms(networks: Tensor, kappas: Tensor, generator: Generator) -> tuple[list[int], Tensor, Tensor]:
    """Squared norms of two gradients over ‖x‖² for every matrix, as the forward pass meets them, and whose block it is.

    The first gradient is of ⟨v, h_0⟩ with a random unit vector v. The second is of the denoising loss ℓ = ‖h_0 − ε‖²
    over 4ℓ, and would be the same if h_0 − ε did not depend on the network. Shape: kappas (N, 1) → (networks,
    matrices), float64, twice.
    """
    x, v, noise = (unit_inputs(networks, generator) for _ in range(3))
    records: list[Record] = []
    output = forward(networks, x.requires_grad_(), kappas, records=records)[0]
    residual = output.detach() - noise
    residual = residual / residual.norm(dim=1, keepdim=True)
    outputs = [made for _, _, made in records]
    independent, denoising = (torch.autograd.grad(output, outputs, w, retain_graph=True) for w in (v, residual))
    return [block for block, _, _ in records], squared_norms(records, independent), squared_norms(records, denoising)


def squared_norms(records: list[Record], gradients: Sequence[Tensor]) -> Tensor:
    """‖δ‖²·‖input‖² is the squared norm of a matrix's gradient δ·inputᵀ. Shape: (networks, matrices)."""
    pairs = zip(records, gradients, strict=True)
    return torch.stack(
        [
            gradient.double().square().sum((1, 2)) * read.detach().double().square().sum((1, 2))
            for (_, read, _), gradient in pairs
        ],
        dim=1,
    )


def lipschitz(networks: Tensor) -> Tensor:
    """Bounds of the blocks' Lipschitz constants: the products of their spectral norms. Shape: (2N+1, networks)."""
    return torch.linalg.eigvalsh((networks.mT @ networks).double())[..., -1].sqrt().prod(1)


def output_changes(networks: Tensor, kappas: Tensor, *, steps: int, size: float, generator: Generator) -> Tensor:
    """‖UNet(x+δ) − UNet(x)‖/‖δ‖, the larger of a random δ and of one that power iteration finds. Shape: (networks, K).

    `size` is ‖δ‖/‖x‖; `steps` of power iteration on the Jacobian at x turn δ towards what changes the output most.
    """
    x = unit_inputs(networks, generator).expand(-1, -1, kappas.shape[1]).clone().requires_grad_()
    output = forward(networks, x, kappas)[0]
    # Jᵀw is linear in w, so that its derivative in the direction δ, by a second backward pass, is J·δ.
    probe = torch.zeros_like(output).requires_grad_()
    pulled = torch.autograd.grad(output, x, probe, create_graph=True)[0]
    delta, changes = torch.randn(x.shape, generator=generator), []
    for step in range(steps + 1):
        delta = delta / delta.norm(dim=1, keepdim=True)
        if step in (0, steps):
            with torch.no_grad():
                moved = forward(networks, x + size * delta, kappas)[0] - output
            changes.append(moved.double().norm(dim=1) / size)
        if step < steps:
            pushed = torch.autograd.grad(pulled, probe, delta, retain_graph=True)[0]
            delta = torch.autograd.grad(output, x, pushed, retain_graph=True)[0]
    return torch.stack(changes).amax(0)
