"""Imports run one way, blockmath stands alone, and nobody waits for what he does not need."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from kvwatch.daemon import LATE_MODULES

PACKAGE = Path(__file__).resolve().parents[1] / "kvwatch"

LAYERS = (
    {"kvwatch.blockmath"},
    {"kvwatch.filestamp", "kvwatch.logs", "kvwatch.sdnotify", "kvwatch.units", "kvwatch.yamlfile"},
    {"kvwatch.config"},
    {"kvwatch.observe"},
    {"kvwatch.doctor", "kvwatch.privileges"},
    {"kvwatch.lineage"},
    {"kvwatch.ledger"},
    {"kvwatch.ownership"},
    {"kvwatch.node"},
    {"kvwatch.headroom"},
    {"kvwatch.forecast"},
    {"kvwatch.export"},
    {"kvwatch.fleet"},
    {"kvwatch.failurelog", "kvwatch.monitor"},
    {"kvwatch.daemon"},
    {"kvwatch.demo"},
    {"kvwatch.cli"},
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

IO_MODULES = {"logging", "os", "pathlib", "socket", "subprocess", "time", "urllib", "requests", "numpy"}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules(tree: ast.AST) -> set[str]:
    """What the import statements below it name."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}"
            names.add(node.module or "")
    return names


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported(path: Path) -> set[str]:
    """What a module imports, and from it: either may be a module."""
    tree = parsed(path)
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return modules(tree) | {f"{node.module}.{alias.name}" for node in statements for alias in node.names}


def imported_late(path: Path) -> set[str]:
    """What functions import."""
    functions = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.FunctionDef)]
    return set().union(*map(modules, functions))


def printed_by(program: str) -> list[str]:
    """The words that a Python program of its own prints."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def rank(module: str) -> int | None:
    return RANK.get(".".join(module.split(".")[:2]))


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_never_run_back(path: Path) -> None:
    own = module_name(path)
    if own == "kvwatch":
        assert not [name for name in imported(path) if name.startswith("kvwatch")]
        return
    own_rank = rank(own)
    assert own_rank is not None, f"{own} has no place in LAYERS"
    back = {name for name in imported(path) if (other := rank(name)) is not None and other > own_rank}
    assert not back, f"{own} imports {sorted(back)}, which stand to its right"


@pytest.mark.parametrize("path", sorted((PACKAGE / "blockmath").rglob("*.py")), ids=module_name)
def test_blockmath_is_pure(path: Path) -> None:
    names = imported(path)
    assert not {name for name in names if name.split(".")[0] in IO_MODULES}
    assert not {
        name for name in names if name.startswith("kvwatch.") and not name.startswith("kvwatch.blockmath")
    }


SELDOM_NEEDED = (
    "bcrypt",
    "numpy",
    "psutil",
    "requests",
    "rich",
    "kvwatch.blockmath.weights",
    "kvwatch.cli.demo",
    "kvwatch.demo",
    "kvwatch.export.statuspage",
    "kvwatch.observe.capture",
    "kvwatch.observe.nextstart_compose",
    "kvwatch.observe.nextstart_kubernetes",
)
"""What `kvwatch run` and `kvwatch status` start without: much of their start would be spent on it."""


def test_a_daemon_loads_at_its_start_what_functions_import() -> None:
    late = {name for path in MODULES if "cli" not in path.parts for name in imported_late(path)}
    assert late - {"bcrypt"} == set(LATE_MODULES)


@pytest.mark.parametrize("command", ["run", "status", "holders"])
def test_a_command_starts_without_what_it_seldom_needs(command: str) -> None:
    loaded = printed_by(f"import sys, kvwatch.cli.{command}; print(*sys.modules)")
    assert "kvwatch.monitor" in loaded
    assert not set(SELDOM_NEEDED).intersection(loaded)


def test_the_package_itself_imports_nothing() -> None:
    program = "import sys; before = set(sys.modules); import kvwatch; print(*set(sys.modules) - before)"
    assert printed_by(program) == ["kvwatch"]
