"""Many networks of Eq. 3 at once: every matrix is a batch of independent samples, multiplied in one product."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

# Numbers in one batch of networks: large enough for fast products, small enough for any machine.
BATCH_NUMBERS = 2**23

Block = list[Tensor]


@dataclass(frozen=True)
class Networks:
    """Samples of `TheoryUNet`: a block is a list of matrices of shape (networks, m, m), item 0 is outermost."""

    encoders: list[Block]
    middle: Block
    decoders: list[Block]

    @property
    def width(self) -> int:
        return self.middle[0].shape[-1]

    def __len__(self) -> int:
        return len(self.middle[0])


def sample_networks(count: int, width: int, num_skips: int, *, block_depth: int = 2, generator: Generator) -> Networks:
    """Blocks W_l σ(W_{l−1} … σ(W_1 x)), every entry from N(0, 2/m)."""

    def block() -> Block:
        std = math.sqrt(2 / width)
        return [torch.empty(count, width, width).normal_(std=std, generator=generator) for _ in range(block_depth)]

    encoders = [block() for _ in range(num_skips)]
    return Networks(encoders, block(), [block() for _ in range(num_skips)])


def sample_batches(count: int, width: int, num_skips: int, generator: Generator) -> Iterator[Networks]:
    """So many networks of blocks with two matrices, in batches that fit in memory."""
    size = max(1, BATCH_NUMBERS // (width**2 * 2 * (2 * num_skips + 1)))
    for start in range(0, count, size):
        yield sample_networks(min(size, count - start), width, num_skips, generator=generator)


def forward(networks: Networks, x: Tensor, kappas: Tensor, scale: Tensor | float = 1.0) -> list[Tensor]:
    """h_0 … h_N for K settings at once, every block's output multiplied by `scale`: √½ gives Kaiming's blocks gain 1.

    Shape: x (networks, m, 1 or K), kappas (N, K), scale (K,) → N+1 times (networks, m, K).
    """
    return forward_with_records(networks, x, kappas, scale)[0]


def forward_with_records(
    networks: Networks, x: Tensor, kappas: Tensor, scale: Tensor | float = 1.0
) -> tuple[list[Tensor], list[tuple[int, Tensor, Tensor]]]:
    """h_0 … h_N, and of every matrix the index i of its block, its input and its output; i = N+1 is the middle."""
    count, skips, records = len(networks.encoders), [], []

    def apply(block: Block, index: int, x: Tensor) -> Tensor:
        for position, matrix in enumerate(block):
            read = x.relu() if position else x
            x = matrix @ read
            records.append((index, read, x))
        return x * scale

    for index, encoder in enumerate(networks.encoders, start=1):
        x = apply(encoder, index, x)
        skips.append(x)
    x = apply(networks.middle, count + 1, x)
    features = [x]
    for index in range(count, 0, -1):
        x = apply(networks.decoders[index - 1], index, kappas[index - 1] * skips[index - 1] + x)
        features.append(x)
    return features[::-1], records


def unit_inputs(count: int, width: int, generator: Generator) -> Tensor:
    """Random directions. Shape: (count, m, 1)."""
    x = torch.randn(count, width, 1, generator=generator)
    return x / x.norm(dim=1, keepdim=True)


def feature_norms(networks: Networks, kappas: Tensor, generator: Generator, scale: Tensor | float = 1.0) -> Tensor:
    """‖h_i‖²/‖x‖² of every network. Shape: kappas (N, K) → (networks, N+1, K), float64."""
    x = unit_inputs(len(networks), networks.width, generator)
    features = forward(networks, x, kappas, scale)
    return torch.stack([h.double().square().sum(1).expand(-1, kappas.shape[1]) for h in features], dim=1)


def gradient_norms(networks: Networks, kappas: Sequence[float], generator: Generator) -> tuple[Tensor, Tensor]:
    """Squared norms of two gradients over ‖x‖². Shape: (networks, N+1), float64, twice; the last is the middle block.

    Of the matrices of a block the mean is taken. The first is of ⟨v, h_0⟩ with a random unit vector v. The second is
    of the denoising loss ℓ = ‖h_0 − ε‖² over 4ℓ, and would be the same if h_0 − ε did not depend on the network.
    """
    count, width = len(networks), networks.width
    x, v = (unit_inputs(count, width, generator) for _ in range(2))
    features, records = forward_with_records(networks, x.requires_grad_(), torch.tensor(kappas).unsqueeze(1))
    outputs = [output for _, _, output in records]
    residual = features[0].detach() - unit_inputs(count, width, generator)
    residual = residual / residual.norm(dim=1, keepdim=True)
    independent, denoising = (torch.autograd.grad(features[0], outputs, w, retain_graph=True) for w in (v, residual))
    return block_norms(records, independent), block_norms(records, denoising)


def block_norms(records: list[tuple[int, Tensor, Tensor]], gradients: Sequence[Tensor]) -> Tensor:
    """‖δ‖²·‖input‖² is the squared norm of a matrix's gradient δ·inputᵀ. Shape: (networks, N+1)."""
    norms: dict[int, list[Tensor]] = {}
    for (index, read, _), gradient in zip(records, gradients, strict=True):
        squared = gradient.double().square().sum((1, 2)) * read.detach().double().square().sum((1, 2))
        norms.setdefault(index, []).append(squared)
    return torch.stack([torch.stack(norms[index]).mean(0) for index in sorted(norms)], dim=1)


def lipschitz(block: Block) -> Tensor:
    """A bound of a block's Lipschitz constant: the product of its spectral norms. Shape: (networks,), float64."""
    norms = [torch.linalg.eigvalsh((matrix.mT @ matrix).double())[:, -1].sqrt() for matrix in block]
    return torch.stack(norms).prod(0)


def pair_gains(networks: Networks) -> tuple[Tensor, Tensor]:
    """M_0 = max_i Lip(b_i)·Lip(a_i) and L_0 = Lip(f_N) of every network. Shape: (networks,), (networks,)."""
    pairs = [lipschitz(a) * lipschitz(b) for a, b in zip(networks.encoders, networks.decoders, strict=True)]
    return torch.stack(pairs).amax(0), lipschitz(networks.middle)


def output_changes(networks: Networks, kappas: Tensor, *, steps: int, size: float, generator: Generator) -> Tensor:
    """‖UNet(x+δ) − UNet(x)‖/‖δ‖, the larger of a random δ and of one that power iteration finds. Shape: (networks, K).

    `size` is ‖δ‖/‖x‖; `steps` of power iteration on the Jacobian at x turn δ towards what changes the output most.
    """
    x = unit_inputs(len(networks), networks.width, generator).expand(-1, -1, kappas.shape[1]).clone().requires_grad_()
    output = forward(networks, x, kappas)[0]
    # Jᵀw is linear in w, so that its derivative in the direction δ, by a second backward pass, is J·δ.
    probe = torch.zeros_like(output).requires_grad_()
    pulled = torch.autograd.grad(output, x, probe, create_graph=True)[0]
    delta, changes = torch.randn(x.shape, generator=generator), []
    for step in range(steps + 1):
        delta = delta / delta.norm(dim=1, keepdim=True)
        if step in (0, steps):
            changes.append(change_along(networks, x.detach(), kappas, size * delta) / size)
        moved = torch.autograd.grad(pulled, probe, delta, retain_graph=True)[0]
        delta = torch.autograd.grad(output, x, moved, retain_graph=True)[0]
    return torch.stack(changes).amax(0)


@torch.no_grad()
def change_along(networks: Networks, x: Tensor, kappas: Tensor, delta: Tensor) -> Tensor:
    """‖UNet(x+δ) − UNet(x)‖. Shape: (networks, m, K) twice → (networks, K), float64."""
    return (forward(networks, x + delta, kappas)[0] - forward(networks, x, kappas)[0]).double().norm(dim=1)
