"""What two processes that train together must agree on; a module of its own, so that they import little."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from scalelong import METHODS, condition_on_self, scale_skips
from scalelong.models import UViT
from scalelong.utils.runtime import end_process

WORLD = 2
GUIDED = "none, conditioned on itself"


def check_all(rank: int, folder: str) -> None:
    """Every wrapper with every method; DDP, which shards nothing, with a constant and a learned one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    try:
        for method in ("cs", "ls", GUIDED):
            check_ddp(rank, method)
        for method in (*METHODS, GUIDED):
            check_fsdp(rank, method)
    finally:
        dist.destroy_process_group()
    end_process(0)  # gloo's threads may abort a process that Python takes apart


def check_ddp(rank: int, method: str) -> None:
    single, inputs = seeded(method)
    model = DistributedDataParallel(copy.deepcopy(single))
    with pytest.raises(ValueError, match="already wrapped by DistributedDataParallel"):
        scale_skips(model, "cs")
    train_one_step(single, inputs)
    train_one_step(model, share(inputs, rank))
    for (name, parameter), other in zip(single.named_parameters(), model.module.parameters(), strict=True):
        assert_same(other, parameter, f"ddp, {method}, {name}")


def check_fsdp(rank: int, method: str) -> None:
    single, inputs = seeded(method)
    model = copy.deepcopy(single)
    for block in (*model.in_blocks, model.mid_block, *model.out_blocks):
        fully_shard(block)
    fully_shard(model)
    with pytest.raises(ValueError, match="already wrapped by fully_shard"):
        scale_skips(model, "cs")
    train_one_step(single, inputs)
    train_one_step(model, share(inputs, rank))
    for (name, parameter), other in zip(single.named_parameters(), model.parameters(), strict=True):
        gathered: Any = other
        assert_same(gathered.full_tensor(), parameter, f"fsdp2, {method}, {name}")


def seeded(method: str) -> tuple[UViT, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = UViT(img_size=8, patch_size=2, embed_dim=32, depth=4, num_heads=2)
    if method == GUIDED:
        nn.init.normal_(condition_on_self(model).get_parameter("self_conditioning.last.weight"))
        return model, (torch.randn(4, 3, 8, 8), torch.linspace(1, 900, 4))
    scale_skips(model, method, **({"activation": "elu"} if method.startswith("ls") else {}))
    return model, (torch.randn(4, 3, 8, 8), torch.linspace(1, 900, 4))


def share(inputs: tuple[Tensor, Tensor], rank: int) -> tuple[Tensor, Tensor]:
    return inputs[0].chunk(WORLD)[rank], inputs[1].chunk(WORLD)[rank]


def train_one_step(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model(*inputs).square().mean().backward()
    optimiser.step()


def assert_same(found: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(found, expected, msg=lambda text: f"{what}: {text}")
