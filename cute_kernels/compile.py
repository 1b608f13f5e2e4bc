"""Compiles CuTe-DSL kernels without a GPU and keeps them: in this process, and as object files on disk.

A kernel is compiled from fake tensors through TVM FFI, so that the result takes torch tensors and plain integers and
needs no Python work at launch. The key of a kernel is its name, its configuration, the sources of this package, the
compiler options, the DSL's version and CUDA build, and the architecture. A warm process loads the object file and
compiles nothing.

On disk one kernel is two files: `<key>.json` names the object file and its SHA-256, `<key>-<digest>.o` is the object.
Each is written under a temporary name and renamed, the object first, so that any number of processes may compile the
same kernel at once and a reader sees all of it or nothing. A file that is truncated, empty or altered is a miss.
"""

import hashlib
import json
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

ARCH = "sm_90a"
CACHE_VARIABLE = "MEGAMOE_CACHE_DIR"  # "" turns the cache on disk off
_ENTRY = "megamoe_kernel"  # symbol of the entry in an object file

Build = Callable[[], tuple[Callable, tuple]]

_lock = threading.RLock()
_loaded: dict[str, Callable] = {}


@dataclass
class Counts:
    """What this process has done so far: a warm process has compiled == 0."""

    compiled: int = 0
    from_disk: int = 0
    seconds: float = 0.0


counts = Counts()


@dataclass(frozen=True)
class Binary:
    """What the compiler made of a kernel, to be looked at."""

    cubin: bytes
    ptx: str
    seconds: float


HOST_ONLY = (
    "launch.py", "backward_launch.py", "world.py", "symmetric.py", "status.py", "compile.py", "sass.py", "weights.py",
)  # fmt: skip
"""Files that shape no kernel."""
FAMILIES = ("wgrad", "backward", "weight_")  # files that begin with one of these belong to kernels of that name only


@lru_cache
def source_hash(name: str) -> str:
    """Hash of this package's Python files, less those of other kernel families: an edit makes a kernel new."""
    others = tuple(f for f in FAMILIES if not name.startswith(f))
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        if path.name not in HOST_ONLY and not path.name.startswith(others):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _options(*more: str) -> str:
    return " ".join((f"--gpu-arch {ARCH}", *more))


@lru_cache(maxsize=1)
def _toolchain() -> str:
    import cutlass

    return f"{cutlass.__version__} {getattr(cutlass, 'CUDA_VERSION', '')} {platform.machine()}"


def kernel_key(name: str, config: Any) -> str:
    """The cache key of kernel `name` with `config`, whose repr must say everything that the code depends on."""
    text = "\n".join((name, repr(config), source_hash(name), _options(), _toolchain(), ARCH))
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def cache_dir() -> Path | None:
    """Where object files are kept: $MEGAMOE_CACHE_DIR, else ~/.cache/megamoe; None if switched off by ""."""
    folder = os.environ.get(CACHE_VARIABLE)
    if folder is None:
        return Path(os.path.expanduser("~")) / ".cache" / "megamoe"
    return Path(folder) if folder else None


def compiled(name: str, config: Any, build: Build) -> Callable:
    """The launchable kernel `name` for `config`: from this process, from disk, or compiled now.

    Args:
        name: what the kernel is, a short word; part of the file names.
        config: everything that shapes the code; its repr is part of the key (a frozen dataclass, or a tuple of them).
        build: makes `(function, fake arguments)` for `cute.compile`; called only when nothing is cached. The last
            argument is `make_fake_stream(use_tvm_ffi_env_stream=True)`: a launch goes to torch's current stream.

    Returns: a callable that takes torch tensors and numbers in the order of the fake arguments, without the stream.
    Effects: writes to the cache directory; a directory that cannot be written is no error.
    """
    key = kernel_key(name, config)
    with _lock:
        if key not in _loaded:
            _loaded[key] = _from_disk(key) or _compile_now(key, build)
        return _loaded[key]


def _compile_now(key: str, build: Build) -> Callable:
    from cutlass import cute

    start = time.perf_counter()
    function, fakes = build()
    result = cute.compile(function, *fakes, options=_options("--enable-tvm-ffi"))
    counts.compiled += 1
    counts.seconds += time.perf_counter() - start
    _publish(key, result)
    return result


def inspect(build: Build) -> Binary:
    """Compiles past all caches and returns cubin and PTX. Needs no GPU, launches nothing.

    Args:
        build: as in `compiled`, but with a plain `make_fake_stream()`.
    """
    from cutlass import cute

    start = time.perf_counter()
    function, fakes = build()
    with tempfile.TemporaryDirectory() as folder:
        result = cute.compile(function, *fakes, options=_options("--keep-cubin", "--keep-ptx", f"--dump-dir {folder}"))
        ptx = result.__ptx__
        return Binary(
            bytes(result.__cubin__), ptx if isinstance(ptx, str) else ptx.decode(), time.perf_counter() - start
        )


def _publish(key: str, result: Any) -> None:
    folder = cache_dir()
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            made = Path(temporary) / "kernel.o"
            result.export_to_c(str(made), function_name=_ENTRY)
            data = made.read_bytes()
            if _load(made) is None:  # nobody else should meet it
                return
            digest = hashlib.sha256(data).hexdigest()
            name = f"{key}-{digest[:16]}.o"
            os.replace(made, folder / name)
            index = Path(temporary) / "index.json"
            index.write_text(json.dumps({"object": name, "sha256": digest}))
            os.replace(index, folder / f"{key}.json")
    except OSError:
        pass  # a read-only or full disk costs the next process a compilation, nothing else


def _from_disk(key: str) -> Callable | None:
    folder = cache_dir()
    if folder is None:
        return None
    try:
        entry = json.loads((folder / f"{key}.json").read_text())
        path = folder / Path(entry["object"]).name
        if hashlib.sha256(path.read_bytes()).hexdigest() != entry["sha256"]:
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    function = _load(path)
    counts.from_disk += function is not None
    return function


def _load(path: Path) -> Callable | None:
    """The entry of an object file; None if it cannot be loaded here: made for another system, or without the entry."""
    from cutlass import cute

    try:
        return getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), _ENTRY)
    except Exception:  # the DSL has errors of its own, and names them anew in every version
        return None
