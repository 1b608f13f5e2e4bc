"""The repository's own sources as data: files, imports, definitions and what the documents name."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("megamoe", "cute_kernels", "checkpoints")
FOLDERS = (*PACKAGES, "tests", "examples", "benchmarks")


def python_files(*folders: str) -> list[Path]:
    """All Python files under the folders (all of the repository's when none is given), sorted."""
    return sorted(p for folder in folders or FOLDERS for p in (ROOT / folder).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def on_path(folder: Path) -> dict[str, str]:
    """PYTHONPATH of a child process: the folder before what this process was given."""
    given = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{given}" if given else str(folder)}


def parse(path: Path) -> ast.Module:
    """Parsed as Python 3.10, the oldest version supported."""
    return ast.parse(path.read_text(), str(path), feature_version=(3, 10))


def imported_modules(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(dotted module, line) of every import statement, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module, node.lineno


def documents() -> list[Path]:
    """The Markdown files a user reads."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def fenced_blocks(text: str, languages: tuple[str, ...]) -> list[str]:
    """Contents of the fenced code blocks in one of the languages."""
    return [body for lang, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S) if lang in languages]


def inline_code(text: str) -> list[str]:
    """What stands between single backticks outside fenced blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def links(text: str) -> list[str]:
    """Targets of Markdown links, without those that leave the repository and without anchors."""
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return [t.split("#")[0] for t in targets if not re.match(r"[a-z]+:", t) and t.split("#")[0]]


def commands(text: str) -> list[str]:
    """Command lines: those of shell blocks, and inline or indented code that starts like one."""
    lines = [line for block in fenced_blocks(text, ("sh", "bash", "console")) for line in block.splitlines()]
    starts = ("make ", "megamoe ", "python ", "torchrun ")
    indented = re.findall(r"^ {4,}(.+)", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    lines += [code for code in inline_code(text) + indented if code.startswith(starts)]
    return [line.split("#")[0].strip().removeprefix("$ ") for line in lines if line.split("#")[0].strip()]
