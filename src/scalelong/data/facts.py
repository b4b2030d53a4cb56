"""What prepared_folder.py imports, until it is utils/blocks.py."""

from .fingerprint import Fingerprint as Facts
from .fingerprint import difference

__all__ = ["Facts", "difference"]
