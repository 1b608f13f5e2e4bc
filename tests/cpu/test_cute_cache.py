"""The disk cache of compiled kernels: many processes at once, damage, folders that refuse, and what is in a key."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from cute_kernels import compile as compile_module
from cute_kernels.backward_problem import BackwardProblem
from cute_kernels.tile_config import Problem, TileConfig
from cute_kernels.wgrad_config import WgradConfig
from tests.cpu.test_cute_compile import Scale, build, forget, fresh  # noqa: F401 - fresh is a fixture
from tests.support.source_tree import on_path

PROCESSES = 8
ROOT = Path(__file__).resolve().parents[2]


def get(factor: int = 3) -> None:
    assert callable(compile_module.compiled("scale", Scale(factor), build(factor)))


def counted() -> tuple[int, int]:
    return compile_module.counts.compiled, compile_module.counts.from_disk


# ---------------------------------------------------------------- processes


def at_once(*folders: Path, processes: int = PROCESSES) -> list[list[list[int]]]:
    """What each of the processes counted, [compiled, from disk], for one folder after the other."""
    code = "import runpy; runpy.run_module('tests.support.cache_processes', run_name='__main__')"
    lines = in_new_process(code, str(processes), *map(str, folders)).splitlines()
    return [json.loads(line) for line in lines]


def assert_whole(folder: Path) -> None:
    """Every index names an object that is what it says, and nothing half-written is left."""
    indices = list(folder.glob("*.json"))
    assert indices
    for index in indices:
        entry = json.loads(index.read_text())
        assert hashlib.sha256((folder / entry["object"]).read_bytes()).hexdigest() == entry["sha256"]
    assert all(path.suffix in (".json", ".o") for path in folder.iterdir()), sorted(folder.iterdir())


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_many_processes_cold_at_once(tmp_path, rounds):
    folders = [tmp_path / str(n) for n in range(rounds)]
    *cold, warm = at_once(*folders, folders[0])
    for folder, found in zip(folders, cold, strict=True):
        assert all(sum(counts) == 1 for counts in found), found
        assert any(compiled for compiled, _ in found)
        assert_whole(folder)
    assert warm == [[0, 1]] * PROCESSES, "warm processes compile nothing"


@pytest.mark.parametrize("kept", [0, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_processes_find_damage_at_once(fresh, kept):  # noqa: F811
    get()
    (made,) = fresh.glob("*.o")
    made.write_bytes(made.read_bytes()[:kept])
    found, again = at_once(fresh, fresh, processes=4)
    assert all(sum(counts) == 1 for counts in found), found
    assert any(compiled for compiled, _ in found)
    assert_whole(fresh)
    assert again == [[0, 1]] * 4


@pytest.mark.parametrize("content", ["garbage", "another ELF", "no entry"])
def test_an_object_that_does_not_load_is_made_again(fresh, content):  # noqa: F811
    """Its hash is right, yet it is of no use here: a file from another system, or of another version."""
    get()
    (made,) = fresh.glob("*.o")
    (index,) = fresh.glob("*.json")
    data = made.read_bytes()
    wrong = {
        "garbage": b"not an object file" * 100,
        "another ELF": data[:18] + b"\xb7" + data[19:],  # e_machine of AArch64
        "no entry": data.replace(b"megamoe_kernel", b"megamoe_kernal"),
    }[content]
    assert wrong != data
    made.write_bytes(wrong)
    index.write_text(json.dumps({"object": made.name, "sha256": hashlib.sha256(wrong).hexdigest()}))
    code = "from tests.cpu.test_cute_cache import counted, get; get(); print(*counted())"
    assert in_new_process(code, MEGAMOE_CACHE_DIR=str(fresh)) == "1 0", "compiled, not loaded"
    assert in_new_process(code, MEGAMOE_CACHE_DIR=str(fresh)) == "0 1"


def in_new_process(code: str, *arguments: str, **environment: str) -> str:
    env = {**os.environ, **on_path(ROOT), **environment}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


KEYS = """
from cute_kernels.compile import kernel_key
from cute_kernels.backward_problem import BackwardProblem
from cute_kernels.tile_config import Problem, TileConfig
from cute_kernels.wgrad_config import WgradConfig
for name, config in (("forward", (Problem(256, 128), TileConfig())), ("wgrad", WgradConfig(256, 128)),
                     ("backward", (BackwardProblem(256, 128), TileConfig())), ("wgrad_plan", ())):
    print(kernel_key(name, config))
"""


def test_keys_are_those_of_any_process_and_hash_seed():
    first, second = (in_new_process(KEYS, PYTHONHASHSEED=seed) for seed in ("1", "2"))
    here = [
        compile_module.kernel_key("forward", (Problem(256, 128), TileConfig())),
        compile_module.kernel_key("wgrad", WgradConfig(256, 128)),
        compile_module.kernel_key("backward", (BackwardProblem(256, 128), TileConfig())),
        compile_module.kernel_key("wgrad_plan", ()),
    ]
    assert first == second == "\n".join(here)


def test_architecture_is_given_not_guessed():
    """A process that sees no GPU, with another architecture in its environment, compiles for Hopper all the same."""
    code = """
from cute_kernels.compile import inspect
from tests.cpu.test_cute_compile import build
print(next(line for line in inspect(build(3, ffi=False)).ptx.splitlines() if line.startswith(".target")))
"""
    assert in_new_process(code, CUDA_VISIBLE_DEVICES="", CUTE_DSL_ARCH="sm_100a") == ".target sm_90a"


# ---------------------------------------------------------------- damage and refusal


@pytest.mark.parametrize("index", ["", "{", "[]", "{}", '{"object": 5, "sha256": ""}', '{"object": "gone.o"}'])
def test_any_damaged_index_is_a_miss(fresh, index):  # noqa: F811
    get()
    (path,) = fresh.glob("*.json")
    path.write_text(index)
    forget()
    get()
    assert counted() == (2, 0)


def test_index_cannot_point_outside_the_folder(fresh):  # noqa: F811
    get()
    (path,), (made,) = fresh.glob("*.json"), fresh.glob("*.o")
    outside = fresh.parent / "outside.o"
    shutil.move(made, outside)
    path.write_text(json.dumps({**json.loads(path.read_text()), "object": str(outside)}))
    forget()
    get()
    assert counted() == (2, 0)


def test_lost_object_is_a_miss(fresh):  # noqa: F811
    get()
    (made,) = fresh.glob("*.o")
    made.unlink()
    forget()
    get()
    assert counted() == (2, 0)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_folder_that_refuses_writes_is_no_error(fresh, monkeypatch, code):  # noqa: F811
    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    get()
    assert counted() == (1, 0) and not list(fresh.iterdir())


def test_disk_that_fills_up_leaves_nothing_half_written(fresh, monkeypatch):  # noqa: F811
    calls, replace = [], os.replace

    def full(source, target):
        calls.append(target)
        if len(calls) == 2:  # the index
            raise OSError(errno.ENOSPC, "full")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    get()
    assert [path.suffix for path in fresh.iterdir()] == [".o"]
    monkeypatch.setattr(os, "replace", replace)
    forget()
    get()
    assert counted() == (2, 0) and len(list(fresh.glob("*.json"))) == 1


def test_read_only_folder_is_read(fresh, monkeypatch):  # noqa: F811
    get()
    monkeypatch.setattr(compile_module, "_publish", lambda *_: pytest.fail("writes"))
    forget()
    get()
    assert counted() == (1, 1)


def test_cache_can_be_switched_off(fresh, monkeypatch):  # noqa: F811
    monkeypatch.setenv(compile_module.CACHE_VARIABLE, "")
    get()
    forget()
    get()
    assert counted() == (2, 0) and not list(fresh.iterdir())


# ---------------------------------------------------------------- keys


@pytest.mark.parametrize("what", ["ARCH", "toolchain", "options"])
def test_other_architecture_or_compiler_shares_no_file(fresh, monkeypatch, what):  # noqa: F811
    key = compile_module.kernel_key("scale", Scale(3))
    if what == "ARCH":
        monkeypatch.setattr(compile_module, "ARCH", "sm_100a")
    elif what == "toolchain":
        monkeypatch.setattr(compile_module, "_toolchain", lambda: "9.9.9")
    else:
        monkeypatch.setattr(compile_module, "_options", lambda *more: "--opt-level 0")
    assert compile_module.kernel_key("scale", Scale(3)) != key


def other(value: object) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 128
    if value == "bf16":
        return "fp8"
    return "bfloat16"


CONFIGS = [Problem(256, 128), BackwardProblem(256, 128), TileConfig(), WgradConfig(256, 128)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: type(c).__name__)
def test_each_option_changes_the_key(config):
    keys = {compile_module.kernel_key("x", config)}
    fields = dataclasses.fields(config)
    for field in fields:
        changed = object.__new__(type(config))  # past checks of values: this is about the key
        values = {f.name: getattr(config, f.name) for f in fields}
        for name, value in {**values, field.name: other(values[field.name])}.items():
            object.__setattr__(changed, name, value)
        keys.add(compile_module.kernel_key("x", changed))
    assert len(keys) == len(fields) + 1
    assert "0x" not in repr(config), "an address would make every process compile"


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A copy of the package's sources, hashed in its place."""
    folder = tmp_path / "cute_kernels"
    shutil.copytree(ROOT / "cute_kernels", folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(compile_module, "__file__", str(folder / "compile.py"))
    yield folder
    compile_module.source_hash.cache_clear()


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("flags.py", {"forward", "backward", "wgrad"}),
        ("forward.py", {"forward", "backward", "wgrad"}),
        ("backward_epilogue.py", {"backward"}),
        ("wgrad.py", {"wgrad"}),
        ("launch.py", set()),
        ("compile.py", set()),
    ],
)
def test_an_edit_makes_the_kernels_new_that_it_may_change(sources, file, changes):
    def keys() -> dict[str, str]:
        compile_module.source_hash.cache_clear()
        return {name: compile_module.kernel_key(name, ()) for name in ("forward", "backward", "wgrad")}

    before = keys()
    path = sources / file
    path.write_text(path.read_text() + "\n# edited\n")
    after = keys()
    assert {name for name in before if before[name] != after[name]} == changes
