"""The processes of a run: devices, precision, what they exchange, how they are stopped. Torch's DDP, FSDP2, autocast.

`torchrun` and `accelerate launch` say by environment variables how many processes there are and which one this is.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic, sleep
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import DistError
from torch.optim import AdamW, Optimizer

from ..config.build import lay_out
from ..config.schema import Config, TrainingConfig
from ..config.sections import OptimConfig
from ..models.mup import RATIO, parameter_groups
from ..runs.run_dir import ResumePoint, Run, RunError, check_unchanged
from ..utils.runtime import Rank, best_device, check_compiler, is_sharded, own_device, resolve_precision, whole
from ..utils.team import brief, patience, together

# The devices whose AdamW is one kernel in every supported version of torch.
FUSED = {"cuda", "cpu", "xpu"}

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# How long a process that was left alone is silent: the one that left says why, and should be read first.
LEFT_ALONE_SECONDS = 3.0

WATCHED = (signal.SIGTERM, signal.SIGINT)

# A launcher passes on a signal that the terminal has already sent to every process: that is one signal, not two.
ECHO_SECONDS = 2.0

SUPERVISED = "SCALELONG_SUPERVISED"
"""Set for a process whose parent passes signals on, and ends it if it hangs: no second signal needs to."""


@dataclass(frozen=True)
class Parallel:
    """This process among those of the run. `precision` is what the network computes in: fp32, bf16 or fp16."""

    rank: Rank
    device: torch.device
    precision: str
    uses_fsdp: bool

    @classmethod
    def open(cls, config: TrainingConfig, rank: Rank | None = None) -> Parallel:
        """Join the processes that a launcher has started, or be the only one; `close` leaves them again."""
        check_launcher()
        kind, rank = best_device(), rank or Rank.here()
        precision = resolve_precision(config.precision, kind)
        if config.compile:
            check_compiler(kind)
        device = torch.device(own_device())
        if rank.world > 1 and not distributed.is_initialized():
            if device.type == "cuda":
                torch.cuda.set_device(device)
            connect("nccl" if device.type == "cuda" else "gloo")
        return cls(rank, device, precision, uses_fsdp=config.parallel == "fsdp" and rank.world > 1)

    def close(self) -> None:
        if self.rank.world > 1 and distributed.is_initialized():
            distributed.destroy_process_group()

    @property
    def is_main(self) -> bool:
        return self.rank.index == 0

    def describe(self) -> dict[str, Any]:
        """What the log of the run says about it."""
        return {"device": self.device, "processes": self.rank.world, "precision": self.precision}

    # The network

    def place(self, network: nn.Module, config: TrainingConfig) -> nn.Module:
        """The network on its device in its memory layout, or this process's shards of it; the same object."""
        self.rank.meet("the data and the network of the others")  # What is done in step has less time.
        if self.uses_fsdp:
            # Shards are rows of the plain layout; convolutions follow the layout of the images then.
            return shard(network, self.device, self.precision)
        return lay_out(network, config, self.device)

    def wrap(self, network: nn.Module, config: TrainingConfig) -> nn.Module:
        """The network as the training step calls it: compiled, and with gradients that all processes average."""
        # Skips are scaled by now: their hooks are traced with the network.
        model: Any = torch.compile(network) if config.compile else network
        if self.rank.world == 1 or self.uses_fsdp:
            return model
        device_ids = [self.device] if self.device.type == "cuda" else None
        with warnings.catch_warnings():
            # Newer versions of torch have another name for this option of theirs, older ones do not know it.
            warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
            # The processes compute the same buffers; sending them around at every step would be waste.
            return nn.parallel.DistributedDataParallel(
                model, device_ids=device_ids, broadcast_buffers=False, gradient_as_bucket_view=True
            )

    def autocast(self) -> AbstractContextManager[Any]:
        """What the network computes in during training."""
        dtype = DTYPES.get(self.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def evaluating(self) -> AbstractContextManager[Any]:
        """float32 for validation, samples and evaluations; shards keep to the precision they are gathered in."""
        return self.autocast() if self.uses_fsdp else nullcontext()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Gradients stay in the process that computed them, to be added to those of the next micro-batch."""
        if self.rank.world == 1:
            return nullcontext()
        wrapped: Any = model
        return without_gradient_sync(wrapped) if self.uses_fsdp else wrapped.no_sync()

    def build_scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler that fp16 needs."""
        return torch.amp.GradScaler(self.device.type) if self.precision == "fp16" else None

    # What the processes exchange

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in each of them."""
        if self.rank.world == 1:
            return tensor
        total = tensor.detach().clone()
        distributed.all_reduce(total)
        return total

    def mean(self, tensor: Tensor) -> Tensor:
        return tensor if self.rank.world == 1 else self.sum(tensor) / self.rank.world

    def any_rank(self, flag: bool) -> bool:
        """Whether it is so in one of the processes; all of them ask at the same time, and wait for each other."""
        if self.rank.world == 1:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=self.device)).item())

    def gather(self, value: Any) -> list[Any]:
        """A small object of every process, in the order of the ranks."""
        if self.rank.world == 1:
            return [value]
        found: list[Any] = [None] * self.rank.world
        distributed.all_gather_object(found, value)
        return found


def connect(backend: str) -> None:
    """Join the processes; one that does not answer for as long as `patience` says ends what they do together."""
    try:
        distributed.init_process_group(backend, timeout=timedelta(seconds=patience()))
    except (RuntimeError, ValueError) as error:
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT")
        given = ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
        raise RunError(f"the processes of this run could not be connected ({given}): {brief(error)}") from error


def launched() -> AbstractContextManager[Rank]:
    """This process as the launcher has started it, with those that it started beside."""
    rank = Rank.here()
    return together(rank) if rank.world > 1 else nullcontext(rank)


@contextmanager
def alone_in(run: Run, start: ResumePoint, parallel: Parallel) -> Iterator[None]:
    """Keep other processes from training in the folder; raises if one has done so since the resume point was found."""
    with run.locked() if parallel.is_main else nullcontext():
        parallel.rank.meet(f"the lock of {run}")
        check_unchanged(run, start)
        parallel.rank.meet(f"a look at {run}")
        yield


@contextmanager
def explain_lost_peer(rank: Rank) -> Iterator[None]:
    """For all that processes do together: one that others have left says so, whatever it waited for them in."""
    try:
        yield
    except RuntimeError as error:
        # The backend of CPUs has no class of errors for it.
        if not isinstance(error, DistError) and "gloo" not in str(error):
            raise
        if not rank.failure():
            sleep(LEFT_ALONE_SECONDS)
        lost = rank.failure() or "another process of this run has ended, or cannot be reached"
        raise RunError(f"{lost}; this one waited for its part of a step ({brief(error)})") from error


class StopSignals:
    """While entered, notes the first SIGTERM or SIGINT in `received`; a second one ends the process at once.

    `several` says that a launcher started this process together with others; `leave` is called before the process is
    ended, and must not wait for anything.
    """

    def __init__(self, *, several: bool = False, leave: Callable[[], None] = lambda: None) -> None:
        self.received: int | None = None
        self.several, self.leave = several, leave
        self._at = 0.0
        self._before: dict[int, Any] = {}
        self.supervised = SUPERVISED in os.environ

    def __enter__(self) -> StopSignals:
        # Python lets only the main thread have handlers; elsewhere whoever runs the thread decides.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in WATCHED}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return self.received is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = monotonic()
        if self.received is None:
            self.received, self._at = number, now
        elif not self.supervised and not (self.several and now - self._at < ECHO_SECONDS):
            # No clean-up: it may be what hangs. Checkpoints are complete or absent in any case.
            self.leave()
            os._exit(128 + number)


def check_launcher() -> None:
    """Raise where `accelerate launch` asks for a wrapping of the network that only Accelerate itself could do."""
    for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() in ("true", "1"):
            hint = "; set training.parallel=fsdp instead" if name == "FSDP" else ""
            raise ValueError(f"accelerate's own {name} is not used: launch without it{hint}")


def check_batch_divides(config: Config, processes: int) -> None:
    """Raise if the global batch cannot be shared evenly, so that no process's mean weighs more than another's."""
    parts = config.training.grad_accumulation
    if config.training.batch_size % (processes * parts):
        raise ValueError(
            f"training.batch_size={config.training.batch_size} cannot be shared evenly by {processes} processes in "
            f"{parts} accumulated micro-batches: make it a multiple of {processes * parts}"
        )


def build_optimizer(network: nn.Module, config: OptimConfig, device: torch.device) -> Optimizer:
    """AdamW; `lr_factor` of a group is what its rate is multiplied by."""
    fused = device.type in FUSED
    groups = [{"params": [weight for weight in network.parameters() if weight.requires_grad], "lr_factor": 1.0}]
    if hasattr(network, RATIO):
        groups = parameter_groups(network, config.weight_decay)
    return AdamW(
        groups,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=fused,
        foreach=None if fused else True,
    )


# FSDP: each process holds a shard of the weights, of their EMA and of the optimiser's state; checkpoints hold whole
# tensors, so that a run saved sharded resumes unsharded, and the other way round.


def shard(network: nn.Module, device: torch.device, precision: str = "fp32") -> nn.Module:
    """Keep only this process's part of the weights, on its device; the network is changed in place and returned.

    Every block is gathered when it is entered and let go of when it is left.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # Gathered in bf16 and averaged in float32; autocast decides what is computed in bf16, as without shards.
    gathered = torch.bfloat16 if precision == "bf16" else None
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (distributed.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(gathered, torch.float32, cast_forward_inputs=False),
        # Also for the root, which torch would leave whole after a forward pass: swapped weights must be seen.
        "reshard_after_forward": True,
    }
    for block in blocks_of(network):
        fully_shard(block, **options)
    return fully_shard(network, **options)  # pyright: ignore[reportReturnType]


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """The outermost entries of module lists: in and out blocks of a U-ViT, down and up blocks of a UNet."""
    lists = [module for module in network.modules() if isinstance(module, nn.ModuleList)]
    inner = {id(module) for found in lists for entry in found for module in entry.modules()}
    entries = (entry for found in lists if id(found) not in inner for entry in found)
    return [entry for entry in entries if next(entry.parameters(), None) is not None]


@contextmanager
def without_gradient_sync(sharded: Any) -> Iterator[None]:
    sharded.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        sharded.set_requires_gradient_sync(True)


def gather_tensors(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Whole tensors, one after the other, on the CPU where `keep` says so, else nothing; for all processes at once."""
    found = ((name, whole(tensor)) for name, tensor in tensors.items())
    kept = ((name, tensor.cpu() if is_sharded(tensors[name]) else tensor) for name, tensor in found if keep)
    return dict(kept)


def scatter_tensors(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors cut as those of the same name in `like` are, where they are cut; for all processes at once."""
    return {name: part(tensor, like[name]) if name in like else tensor for name, tensor in tensors.items()}


def part(tensor: Tensor, like: Tensor) -> Tensor:
    if not is_sharded(like) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = like
    return distribute_tensor(tensor.to(like.device, like.dtype), sharded.device_mesh, sharded.placements)
