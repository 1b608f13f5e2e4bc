"""The repository's promises about itself: direction of imports, sizes, packaging, and documents that tell the truth."""

import ast
import re
import shlex
import subprocess
import sys

import pytest
import torch

from megamoe import __version__
from megamoe.cli import COMMANDS, build_parser
from tests.support.source_tree import (
    FOLDERS,
    PACKAGES,
    ROOT,
    commands,
    documents,
    imported_modules,
    inline_code,
    links,
    parse,
    python_files,
    relative,
)

MAX_LINES = 800
MAX_FUNCTION_LINES = 150
MAY_IMPORT = {
    "checkpoints": {"checkpoints"},
    "cute_kernels": {"cute_kernels"},
    "megamoe": {"megamoe", "cute_kernels", "checkpoints"},
    "examples": {"examples", *PACKAGES},
    "benchmarks": {"benchmarks", *PACKAGES},
    "tests": set(FOLDERS),
}
ONLY_THIRD_PARTY = {"checkpoints": {"torch", "safetensors"}}
NO_THIRD_PARTY = {"megamoe": {"cutlass", "cuda"}, "checkpoints": {"triton", "cutlass"}, "cute_kernels": {"triton"}}


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_run_one_way(folder):
    wrong = []
    for path in python_files(folder):
        for module, line in imported_modules(parse(path)):
            top = module.split(".")[0]
            inside = top in FOLDERS and top not in MAY_IMPORT[folder]
            refused = top in NO_THIRD_PARTY.get(folder, ())
            allowed = ONLY_THIRD_PARTY.get(folder)
            foreign = allowed is not None and top not in {*allowed, *FOLDERS, *sys.stdlib_module_names}
            if inside or refused or foreign:
                wrong.append(f"{relative(path)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_the_direction_test_can_fail():
    tree = ast.parse("import os\nfrom megamoe.recipe import Recipe\ndef f():\n    import triton.language as tl\n")
    assert [m for m, _ in imported_modules(tree)] == ["os", "megamoe.recipe", "triton.language"]


def test_triton_is_imported_in_its_own_package_only():
    wrong = [
        f"{relative(path)}:{line}"
        for path in python_files("megamoe")
        if "triton_kernels" not in path.parts
        for module, line in imported_modules(parse(path))
        if module.split(".")[0] == "triton"
    ]
    assert not wrong, wrong


def test_files_and_functions_stay_readable():
    wrong = []
    for path in python_files():
        lines = path.read_text().count("\n")
        if lines > MAX_LINES:
            wrong.append(f"{relative(path)}: {lines} lines, at most {MAX_LINES}")
        for node in ast.walk(parse(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    wrong.append(f"{relative(path)}:{node.lineno} {node.name}: {length} lines")
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_is_for():
    silent = [
        relative(path) for path in python_files() if path.read_text().strip() and not ast.get_docstring(parse(path))
    ]
    assert not silent, silent


def test_every_package_is_listed_typed_and_importable_from_one_version():
    text = (ROOT / "pyproject.toml").read_text()
    listed = set(re.findall(r'"([\w.]+)"', re.search(r"^packages = \[(.*?)\]", text, re.M | re.S).group(1)))
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for package in PACKAGES
        for path in (ROOT / package).rglob("__init__.py")
    }
    assert listed == found
    folders = {
        ".".join(path.parent.relative_to(ROOT).parts) for package in PACKAGES for path in (ROOT / package).rglob("*.py")
    }
    assert folders == found, "a folder of modules without __init__.py would not be installed"
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").exists()
    written = [p for p in python_files() if re.search(r"^__version__\s*=", p.read_text(), re.M)]
    assert [relative(p) for p in written] == ["megamoe/_version.py"]
    assert re.search(rf"^## {re.escape(__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)


IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
for blocked in ("triton", "cutlass", "nvidia_cutlass_dsl", "cuda", "transformers", "matplotlib"):
    sys.modules[blocked] = None
before = set(sys.modules)
import torch
names = []
for package in {packages!r}:
    module = importlib.import_module(package)
    names += [package] + [m.name for m in pkgutil.walk_packages(module.__path__, package + ".", lambda n: None)]
failed = []
for name in names:
    if name.startswith({skip!r}) or name.endswith("__main__"):
        continue
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed.append(f"{{name}}: {{error}}")
assert not failed, failed
assert not torch.cuda.is_initialized(), "importing initialised CUDA"
assert not torch.distributed.is_initialized()
print(len(names))
"""


MISSING_IS_NAMED = """
import cute_kernels
from megamoe.backends import Problem, why_not
assert not cute_kernels.is_available()
hopper = Problem("cuda", (9, 0), "fp8", 7168, 2048)
assert "nvidia-cutlass-dsl is not installed; pip install 'megamoe[cute]'" in why_not("cute", hopper)
assert "triton is not installed; pip install 'megamoe[triton]'" in why_not("triton", hopper)
assert why_not("torch", hopper) is None
"""


def run_python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_everything_but_kernels_imports_without_triton_and_the_dsl():
    """Of megamoe all but the Triton kernels, of cute_kernels the package itself, and all of checkpoints."""
    code = IMPORT_EVERYTHING.format(packages=("megamoe", "checkpoints"), skip="megamoe.triton_kernels")
    result = run_python(code + MISSING_IS_NAMED)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 10


def test_importing_the_package_stays_light():
    """No test framework, no plots, no compilers, no transformers behind `import megamoe`."""
    code = (
        "import sys, megamoe, checkpoints, cute_kernels\n"
        "heavy = {'transformers', 'matplotlib', 'pytest', 'cutlass', 'triton.compiler'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def test_tests_of_this_folder_see_no_gpu():
    """On a machine with one too, so that they are the same tests everywhere."""
    assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
    result = run_python("import torch; assert torch.cuda.device_count() == 0")
    assert result.returncode == 0, result.stderr


# ---------------------------------------------------------------- documents

PATH = re.compile(r"^\.?[\w.-]+(/[\w.*<>-]+)+/?$|^[\w-]+\.(py|md|toml|json|txt)$|^Makefile$|^LICENSE$")
NOT_OURS = {"config.json", "model.safetensors.index.json"}  # files of a checkpoint


def names_a_path(code: str) -> bool:
    first = code.split("/")[0]
    if not PATH.match(code) or code in NOT_OURS or any(c in code for c in "*<>"):
        return False
    return "/" not in code or (ROOT / first).exists() or first in FOLDERS


def exists(code: str) -> bool:
    """A path from the root, or the name alone of a Python file, whose folder the text says."""
    return (ROOT / code).exists() or ("/" not in code and any(path.name == code for path in python_files()))


@pytest.mark.parametrize("document", documents(), ids=relative)
def test_every_path_in_the_documents_exists(document):
    text = document.read_text()
    missing = [f"`{code}`" for code in inline_code(text) if names_a_path(code) and not exists(code)]
    missing += [f"({target})" for target in links(text) if not (document.parent / target).exists()]
    assert not missing, f"{relative(document)}: {missing}"


def test_the_pages_on_the_fused_kernels_name_every_file():
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("fused_forward.md", "fused_backward.md"))
    files = [relative(path) for path in python_files("cute_kernels") if path.name != "__init__.py"]
    missing = sorted(set(files) - set(inline_code(pages)))
    assert len(files) > 30 and not missing, missing


def test_the_path_test_can_fail():
    assert all(names_a_path(code) and not exists(code) for code in ("tests/cpu/nothing.py", "nothing.py", "docs/no.md"))


@pytest.mark.parametrize("document", documents(), ids=relative)
def test_every_module_in_the_documents_exists(document):
    wrong = []
    for code in inline_code(document.read_text()):
        if re.fullmatch(r"(megamoe|cute_kernels|checkpoints|benchmarks)(\.\w+)+(\(.*\))?", code):
            dotted = code.split("(")[0].split(".")
            candidates = ["/".join(dotted[:n]) for n in range(len(dotted), 0, -1)]
            module = next(c for c in candidates if (ROOT / c).is_dir() or (ROOT / f"{c}.py").exists())
            rest = dotted[module.count("/") + 1 :]
            path = ROOT / f"{module}.py" if (ROOT / f"{module}.py").exists() else ROOT / module / "__init__.py"
            if rest and not re.search(rf"\b{rest[0]}\b", path.read_text()):
                wrong.append(code)
    assert not wrong, f"{relative(document)}: {wrong}"


def check_command(command: str) -> str | None:
    """Why a command named in a document does not exist, or None; options of our own commands are parsed too."""
    words = shlex.split(command)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    program, rest = (words[0], words[1:]) if words else ("", [])
    if program == "make":
        wrong = [w for w in rest if "=" not in w and not w.startswith("-") and w not in targets]
        return f"no target {wrong[0]}" if wrong else None
    if program == "torchrun":  # its own options, then what python would be given
        begin = next((i for i, w in enumerate(rest) if w == "-m" or w.endswith(".py")), len(rest))
        program, rest = "python", rest[begin:]
    if program.startswith("python"):
        if rest[:2] == ["-m", "megamoe"]:
            program, rest = "megamoe", rest[2:]
        elif rest[:1] == ["-m"]:
            ours = rest[1].split(".")[0] in FOLDERS
            path = ROOT / rest[1].replace(".", "/")
            return "no such module" if ours and not (path.with_suffix(".py").exists() or path.is_dir()) else None
        else:
            return None if rest and (rest[0] == "-c" or (ROOT / rest[0]).is_file()) else "no such script"
    if program == "megamoe" and rest and rest[0] not in ("--help", "--version"):
        if rest[0] not in COMMANDS:
            return f"no command {rest[0]}"
        try:
            build_parser(rest[0]).parse_args(rest[1:])
        except SystemExit as stop:
            return None if stop.code == 0 else "its options are refused"
    return None


@pytest.mark.parametrize("document", documents(), ids=relative)
def test_every_command_in_the_documents_exists(document, capsys):
    wrong = [f"{c}: {why}" for c in commands(document.read_text()) if (why := check_command(c))]
    assert not wrong, f"{relative(document)}: {wrong}"


@pytest.mark.parametrize(
    "command",
    [
        "make nothing",
        "megamoe fly",
        "megamoe verify --wings 2",
        "python examples/nothing.py",
        "python -m benchmarks.no",
        "torchrun --nproc-per-node=2 examples/nothing.py",
        "torchrun --nproc-per-node=2 -m tests.gpu.nothing",
        "torchrun --nproc-per-node=2 -m megamoe verify --wings 2",
        "torchrun --nproc-per-node=2",
    ],
)
def test_the_command_test_can_fail(command, capsys):
    assert check_command(command)


def test_commands_are_found_wherever_they_stand():
    text = "`make test`\n\n```sh\n$ megamoe info  # why\n```\n\n    torchrun -m megamoe fly\n    x = 1\n"
    assert sorted(commands(text)) == ["make test", "megamoe info", "torchrun -m megamoe fly"]


def test_make_targets_are_phony_and_ci_calls_them():
    makefile = (ROOT / "Makefile").read_text()
    phony = set(re.search(r"^\.PHONY: (.*)$", makefile, re.M).group(1).split())
    assert phony == set(re.findall(r"^([a-z]+):", makefile, re.M))
    ci = (ROOT / ".ci" / "run").read_text()
    assert {"test", "lint", "demo"} <= set(re.findall(r"^make (\w+)", ci, re.M)) <= phony


def test_license_is_apache_2():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text and len(text) > 10_000
