"""Tiny frozen encoders, saved as the libraries save real ones, pictures with captions to encode, and killed jobs.

`python prepare_cases.py '[{"root": …, "out": …, "processes": 2, "kills": 3, "seed": 0, "block_rows": 4}]'` prepares in
forked processes, which it kills with SIGKILL at random moments.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scalelong.data import DataConfig, load_images
from scalelong.data.config import LatentConfig, TextConfig
from scalelong.data.encoders import LatentEncoder, TextEncoder
from scalelong.data.prepare import Job, prepare
from scalelong.data.prepared import PreparedData, open_prepared
from scalelong.utils.block_folder import BlockFolder
from scalelong.utils.runtime import Rank

WORDS = ["a", "the", "dog", "cat", "runs", "sits", "on", "grass", "snow", "red", "blue", "small"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
TEXT_WIDTH, IMAGE_SIDE = 16, 16


def save_tokenizer(folder: Path, *, pad: str = "[PAD]") -> None:
    """A tokenizer of a dozen words that puts [CLS] before and [SEP] after a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer: Any = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, unk_token="[UNK]").save_pretrained(folder)


def save_bert(folder: Path, seed: int = 0) -> Path:
    from transformers import BertConfig, BertModel

    torch.manual_seed(seed)
    sizes = {"hidden_size": TEXT_WIDTH, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=16, max_position_embeddings=32, **sizes)).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_clip(folder: Path, seed: int = 0) -> Path:
    """The whole of CLIP, as it is on the hub: a text and a vision network; [SEP] ends a text and pads it."""
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(seed)
    sizes = {"hidden_size": TEXT_WIDTH, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": 16, "max_position_embeddings": 32, "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 3}
    config = CLIPConfig(
        text_config=sizes | text, vision_config=sizes | {"image_size": 8, "patch_size": 4}, projection_dim=8
    )
    CLIPModel(config).save_pretrained(folder)
    save_tokenizer(folder, pad="[SEP]")
    return folder


def save_autoencoder(folder: Path, seed: int = 0) -> Path:
    """Two latent channels, and four pixels to a latent."""
    from diffusers import AutoencoderKL

    torch.manual_seed(seed)
    AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        latent_channels=2,
        norm_num_groups=4,
        sample_size=IMAGE_SIDE,
    ).save_pretrained(folder)
    return folder


def save_t5(folder: Path) -> Path:
    from transformers import T5Config, T5Model

    sizes = {"d_model": TEXT_WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    T5Model(T5Config(vocab_size=16, **sizes)).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_pictures(path: Path, rows: int = 24, *, broken: Collection[int] = (), seed: int = 0) -> Path:
    """A parquet file: pictures of noise, labels, and one to three captions for each; some pictures cannot be read."""
    import pyarrow
    import pyarrow.parquet
    from PIL import Image

    chance = random.Random(seed)
    columns: dict[str, list[Any]] = {"image": [], "label": [], "captions": []}
    for row in range(rows):
        file = io.BytesIO()
        pixels = chance.randbytes(3 * IMAGE_SIDE * IMAGE_SIDE)
        Image.frombytes("RGB", (IMAGE_SIDE, IMAGE_SIDE), pixels).save(file, format="PNG")
        columns["image"].append({"bytes": b"no picture" if row in broken else file.getvalue(), "path": None})
        columns["label"].append(row % 3)
        captions = [" ".join(chance.choices(WORDS, k=chance.randint(1, 9))) for _ in range(1 + row % 3)]
        columns["captions"].append(captions)
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def save_all(root: Path, rows: int = 24) -> Path:
    """Encoders and pictures under one folder."""
    save_bert(root / "bert")
    save_clip(root / "clip")
    save_autoencoder(root / "autoencoder")
    save_pictures(root / "pictures.parquet", rows)
    return root


def tiny_job(root: Path, out: Path, *, what: str = "both", block_rows: int = 5, **data: Any) -> Job:
    """`what` is text, latents, both or images; of 24 rows, 6 are for validation."""
    columns = {"label_column": "label", "caption_column": "captions", "validation_count": 6}
    source = {"source": str(root / "pictures.parquet"), "image_size": IMAGE_SIDE}
    text = TextConfig(encoder=str(root / "bert"), max_length=8)
    latents = LatentConfig(autoencoder=str(root / "autoencoder"), channels=2, factor=2)
    return Job(
        DataConfig(**(source | columns | data)),
        None if what in ("latents", "images") else text,
        None if what in ("text", "images") else latents,
        out,
        block_rows=block_rows,
    )


def copy_of(job: Job, folder: Path) -> Job:
    shutil.copytree(job.folder, folder)
    return replace(job, folder=folder)


def open_job(job: Job, **changes: Any) -> PreparedData:
    """The prepared data of a job, or of one with some blocks changed."""
    job = replace(job, **changes)
    loaded = load_images(job.data) if job.latents is None else None
    images = None if loaded is None else (loaded.train, loaded.validation)
    return open_prepared(job, images=images)


def seeds(count: int, first: int = 0) -> Tensor:
    return torch.arange(first, first + count)


def damage(file: Path) -> None:
    """Change one byte in the middle."""
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def in_processes(*plans: dict[str, Any]) -> list[int]:
    """Run plans of killed jobs; how many processes each kill ended, over all plans."""
    command = [sys.executable, __file__, json.dumps(plans, default=str)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def main(plans: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    # What a job imports when it needs it is imported once, for all children; nothing is read, because that may start
    # threads, whose locks a forked process would wait for in vain.
    import datasets  # noqa: F401
    import pyarrow.parquet  # noqa: F401

    job = tiny_job(Path(plans[0]["root"]), Path())
    assert job.text is not None and job.latents is not None
    TextEncoder(job.text), LatentEncoder(job.latents)
    hits = []
    for plan in plans:
        out, chance = Path(plan["out"]), random.Random(plan.get("seed", 0))
        for _ in range(plan.get("kills", 0)):
            children = [fork(plan, rank) for rank in range(plan.get("processes", 1))]
            wait_for_blocks(BlockFolder(out), chance.randint(0, 2), children)
            time.sleep(chance.uniform(0, 0.03))
            for child in children:
                os.kill(child, signal.SIGKILL)
            hits.append(sum(os.waitpid(child, 0)[1] == signal.SIGKILL for child in children))
        codes = [os.waitpid(fork(plan, rank), 0)[1] for rank in reversed(range(plan.get("processes", 1)))]
        if any(codes):
            sys.exit(f"the job in {out} failed: {codes}")
    print(json.dumps(hits))


def fork(plan: dict[str, Any], rank: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        job = tiny_job(Path(plan["root"]), Path(plan["out"]), block_rows=plan.get("block_rows", 5))
        prepare(job, Rank(rank, plan.get("processes", 1)))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def wait_for_blocks(folder: BlockFolder, more: int, children: list[int]) -> None:
    """Return once so many further blocks are finished, or a child has ended."""
    count = len(folder.finished_names()) + more
    while not folder.path.exists() or len(folder.finished_names()) < count:
        if any(os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) for child in children):
            return
        time.sleep(0.001)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
