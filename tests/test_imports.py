"""What `import scalelong` may load, and which of its packages may import which."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "scalelong"

OPTIONAL = {
    *("accelerate", "datasets", "diffusers", "transformers", "torchmetrics", "safetensors", "scipy", "sklearn"),
    *("matplotlib", "jinja2", "typer", "rich", "pydantic", "yaml", "tensorboard", "timm", "einops"),
}

# Each package may import from itself and from the rows above it: data enters at the top and leaves at the bottom.
LAYERS = (
    ("utils",),
    ("skips", "models", "diffusion"),
    ("data",),
    ("config",),
    ("runs",),
    ("sampling",),
    ("guard",),
    ("evaluation", "monitor", "theory"),
    ("kappa",),
    ("training",),
    ("compare",),
    ("cli",),
)

# Rows that a layer's number does not say: who stands beside the walk.
ALLOWED: dict[str, set[str]] = {
    name: {other for row in LAYERS[:depth] for other in row} for depth, row in enumerate(LAYERS) for name in row
}
ALLOWED["report"] = {"utils"}
ALLOWED["cli"] |= {"report", "__init__"}
ALLOWED["__main__"] = {"cli"}
ALLOWED["__init__"] = set(ALLOWED)

# Attempts are recorded, not only successes: a guarded import of a package that is absent here counts too. torch comes
# first, because what it loads by itself is its own affair.
RECORD_ATTEMPTS = """
import sys
import {first}

class Recorder:
    def find_spec(self, name, path=None, target=None):
        attempted.add(name.partition(".")[0])

attempted = set()
sys.meta_path.insert(0, Recorder())
{statements}
open(sys.argv[1], "w").write(" ".join(attempted))
"""


def run_freshly(statements: str, record: Path, first: str = "torch") -> tuple[set[str], str]:
    """Run statements in a new process; what they tried to import, and everything they wrote to the terminal."""
    command = [sys.executable, "-c", RECORD_ATTEMPTS.format(first=first, statements=statements), str(record)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return set(record.read_text().split()), done.stdout


def test_importing_scalelong_its_models_and_diffusion_needs_torch_only_and_prints_nothing(tmp_path: Path) -> None:
    calls = "scalelong.models.preset_names(); scalelong.models.example_inputs('cifar10-unet')"
    statements = f"import scalelong, scalelong.models, scalelong.diffusion; {calls}"
    attempted, output = run_freshly(statements, tmp_path / "attempted")
    assert "scalelong" in attempted
    assert attempted & OPTIONAL == set()
    assert output == ""


def test_finding_an_edge_needs_torch_and_scipy_only(tmp_path: Path) -> None:
    attempted, output = run_freshly("import scalelong; scalelong.find_edge", tmp_path / "attempted")
    assert attempted & OPTIONAL == {"scipy"}
    assert output == ""


def test_saving_a_scaled_network_is_imported_when_asked_for_and_needs_no_library_yet(tmp_path: Path) -> None:
    statements = "import scalelong; scalelong.save_pretrained; scalelong.from_pretrained"
    attempted, output = run_freshly(statements, tmp_path / "attempted")
    assert attempted & OPTIONAL == set()
    assert output == ""


def test_the_record_of_imports_sees_one_that_is_guarded_and_absent(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "guarded.py").write_text("try:\n    import absent_here\nexcept ImportError:\n    print('absent')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    attempted, output = run_freshly("import guarded", tmp_path / "attempted", first="os")
    assert "absent_here" in attempted
    assert output == "absent\n"


def package_of(file: Path, source: Path) -> str:
    """The row of the table that a file belongs to: its folder under the source, or its own name at the top."""
    return file.relative_to(source).with_suffix("").parts[0]


def imported_modules(node: ast.stmt, file: Path, source: Path) -> Iterator[tuple[str, ...]]:
    """Absolute dotted names, split, of the modules or members that one statement imports."""
    if isinstance(node, ast.Import):
        yield from (tuple(alias.name.split(".")) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        folders = file.relative_to(source.parent).parts[:-1]
        base = folders[: len(folders) + 1 - node.level] if node.level else ()
        module = (*base, *(node.module.split(".") if node.module else ()))
        yield from ((*module, alias.name) for alias in node.names)


def our_package(name: tuple[str, ...], source: Path) -> str | None:
    """The row of the table that an imported name belongs to; `__init__` for a member of `scalelong` itself."""
    if name[0] != source.name:
        return None
    is_package = len(name) > 1 and (name[1] in ALLOWED or (source / name[1]).is_dir())
    return name[1] if is_package else "__init__"


def forbidden_imports(source: Path) -> list[str]:
    """One line for each import, wherever in a file, that the table does not allow."""
    found = []
    for file in sorted(source.rglob("*.py")):
        package = package_of(file, source)
        if package not in ALLOWED:
            found.append(f"{file}: {package!r} has no row in ALLOWED; add one that says what it may import")
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for name in imported_modules(node, file, source) if isinstance(node, ast.stmt) else ():
                target = our_package(name, source)
                if target is not None and target not in ALLOWED[package] | {package}:
                    may = ", ".join(sorted(ALLOWED[package])) or "nothing of ours"
                    found.append(f"{file}:{node.lineno}: {package} imports {'.'.join(name)}, but may import {may}")
    return found


def test_imports_only_point_upward() -> None:
    assert (SOURCE / "skips" / "site.py").is_file(), "without files the law would hold of nothing"
    found = forbidden_imports(SOURCE)
    assert not found, "\n" + "\n".join(found)


def write_module(folder: Path, path: str, text: str) -> Path:
    """A source tree in `folder` with a single module in it."""
    source = folder / "scalelong"
    (source / path).parent.mkdir(parents=True, exist_ok=True)
    (source / path).write_text(text)
    return source


@pytest.mark.parametrize(
    ("path", "statement"),
    [
        ("skips/families.py", "import scalelong.models.uvit"),
        ("skips/families.py", "from scalelong.models import UViT"),
        ("skips/families.py", "from scalelong import models"),
        ("skips/families.py", "from scalelong import scale_skips"),
        ("skips/families.py", "import scalelong"),
        ("skips/families.py", "from ..models import UViT"),
        ("skips/families.py", "from .. import models"),
        ("skips/__init__.py", "from ..models.uvit import UViT"),
        ("data/text/clip.py", "from ...config import schema"),
        ("models/uvit.py", "def build():\n    from scalelong.skips import find_skips"),
        ("training/loop.py", "from scalelong.compare import grid"),
        ("monitor/monitor.py", "from scalelong.evaluation import metrics"),
        ("report/page.py", "from scalelong.training import loop"),
        ("evaluation/metrics.py", "from scalelong.cli import main"),
        ("evaluation/metrics.py", "from scalelong.training import loop"),
    ],
)
def test_a_forbidden_import_is_named_with_its_place(tmp_path: Path, path: str, statement: str) -> None:
    source = write_module(tmp_path, path, statement)
    (found,) = forbidden_imports(source)
    line = 1 + statement.count("\n")
    assert found.startswith(f"{source / path}:{line}: {path.split('/')[0]} imports scalelong")


@pytest.mark.parametrize(
    ("path", "statement"),
    [
        ("skips/families.py", "from .site import SkipSite"),
        ("skips/families.py", "from scalelong.skips.site import SkipSite"),
        ("skips/families.py", "import torch, scalelonger"),
        ("skips/__init__.py", "from . import site"),
        ("training/loop.py", "from ..skips import scale_skips"),
        ("training/loop.py", "from scalelong.monitor import monitor"),
        ("cli.py", "from scalelong import scale_skips, report"),
        ("__init__.py", "from .skips import scale_skips"),
    ],
)
def test_an_upward_import_passes(tmp_path: Path, path: str, statement: str) -> None:
    assert forbidden_imports(write_module(tmp_path, path, statement)) == []


def test_a_package_without_a_row_in_the_table_is_refused(tmp_path: Path) -> None:
    (found,) = forbidden_imports(write_module(tmp_path, "newcomer/thing.py", "import torch"))
    assert "'newcomer' has no row" in found
