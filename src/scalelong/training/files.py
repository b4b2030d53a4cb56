"""The file operations of a checkpoint."""

from ..files import (
    Damaged,
    Files,
    describe,
    free_space,
    human_size,
    import_safetensors,
    read_tensors,
    sha256_of,
    to_json,
    verify_file,
    write_whole,
)

__all__ = [
    "Damaged",
    "Files",
    "describe",
    "free_space",
    "human_size",
    "import_safetensors",
    "read_tensors",
    "sha256_of",
    "to_json",
    "verify_file",
    "write_whole",
]
