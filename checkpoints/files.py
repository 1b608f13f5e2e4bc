"""Which file of a checkpoint holds which tensor, and reading tensors from there one at a time.

A checkpoint is a folder with an index (`*.safetensors.index.json`) and its shards, a folder with exactly one
`*.safetensors` file, or such a file itself. Headers are parsed by the safetensors library; what is added here are the
checks that span files: names that leave the folder, shards that are missing or strange, keys in the wrong shard.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from checkpoints.errors import CheckpointError, listed

INDEX_SUFFIX = ".safetensors.index.json"
MAX_INDEX_BYTES = 1 << 28
MAX_CONFIG_BYTES = 1 << 22
WINDOW_BYTES = 1 << 26
"""Bytes read through one mapping of a shard before it is mapped anew, so that touched pages do not pile up."""


@dataclass(frozen=True)
class TensorMeta:
    """What a header says of one tensor: `dtype` in safetensors' spelling ("F8_E4M3", "BF16", ...)."""

    key: str
    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ReadRequest:
    """One tensor to read: `rows` = (start, stop) on its first dimension or None for all; `sink` copies it away."""

    key: str
    sink: Callable[[torch.Tensor], object]
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class CheckpointSource:
    """The files of a checkpoint, opened lazily.

    Attributes:
        folder: where all files lie.
        file_of: the shard that holds each key, as the index (or the only file) says.
        index: name of the index file, or None.
        allow_links: whether links out of the folder are followed.
    """

    folder: Path
    file_of: Mapping[str, str]
    index: str | None
    allow_links: bool = False

    def beside(self, name: str) -> Path | None:
        """A file beside the shards, None if there is none. Raises CheckpointError for a link that is not followed."""
        path = self.folder / name
        if path.is_symlink():
            _check_inside(self.folder, name, self.allow_links)
        return path if path.is_file() else None

    def config(self) -> dict[str, Any] | None:
        """What config.json holds, None if there is none. Raises CheckpointError for what is no JSON object."""
        path = self.beside("config.json")
        if path is None:
            return None
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise CheckpointError(f"config.json: expected at most {MAX_CONFIG_BYTES} bytes, got {path.stat().st_size}.")
        try:
            config = json.loads(path.read_bytes())
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise CheckpointError(f"config.json: expected JSON, got {str(error)[:120]}.") from error
        if not isinstance(config, dict):
            raise CheckpointError("config.json: expected an object, got something else.")
        return config

    def keys_under(self, prefix: str) -> list[str]:
        """All keys that start with `prefix`, sorted."""
        return sorted(key for key in self.file_of if key.startswith(prefix))

    def metas(self, keys: Iterable[str], prefix: str) -> dict[str, TensorMeta]:
        """Dtype and shape of `keys`, from the headers of their shards alone.

        Args:
            keys: keys of `file_of`.
            prefix: keys that a shard holds under this prefix must be the ones the index places there.

        Raises:
            CheckpointError: a shard is unreadable or truncated, lacks a key that the index places in it, or holds a key
                under `prefix` that the index places elsewhere or does not know.
        """
        by_file: dict[str, list[str]] = defaultdict(list)
        for key in keys:
            by_file[self.file_of[key]].append(key)
        found: dict[str, TensorMeta] = {}
        for file, wanted in sorted(by_file.items()):
            with _open(self.folder, file) as shard:
                held = set(shard.keys())
                self._check_contents(file, wanted, held, prefix)
                for key in wanted:
                    header = shard.get_slice(key)
                    found[key] = TensorMeta(key, file, str(header.get_dtype()), tuple(header.get_shape()))
        return found

    def read(self, requests: Iterable[ReadRequest], window_bytes: int = WINDOW_BYTES) -> None:
        """Read tensors shard by shard and hand each to its sink; none is held when the next is read.

        Args:
            requests: in any order; a shard is visited once.
            window_bytes: bytes read through one mapping before it is dropped; bounds resident memory to this much
                plus one tensor.

        Raises:
            CheckpointError: a shard became unreadable since its header was checked.
        """
        by_file: dict[str, list[ReadRequest]] = defaultdict(list)
        for request in requests:
            by_file[self.file_of[request.key]].append(request)
        for file, wanted in sorted(by_file.items()):
            done = 0
            while done < len(wanted):
                touched = 0
                with _open(self.folder, file) as shard:
                    while done < len(wanted) and touched <= window_bytes:
                        touched += _read_one(shard, file, wanted[done])
                        done += 1

    def tensor(self, key: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """One tensor, as a copy that no longer depends on the file."""
        copies: list[torch.Tensor] = []
        self.read([ReadRequest(key, lambda stored: copies.append(stored.to(device, copy=True)))])
        return copies[0]

    def _check_contents(self, file: str, wanted: list[str], held: set[str], prefix: str) -> None:
        missing = sorted(set(wanted) - held)
        if missing:
            raise CheckpointError(
                f"{file}: expected the keys that {self.index} places there, got a shard without {listed(missing)}. "
                "Fetch the shard again, or the index that belongs to it."
            )
        strange = sorted(key for key in held if key.startswith(prefix) and self.file_of.get(key) != file)
        if strange:
            raise CheckpointError(
                f"{file}: expected only keys that {self.index} places there, got {listed(strange)}. "
                "The shard belongs to another checkpoint or the index is stale."
            )


def open_source(path: str | Path, *, allow_links: bool = False) -> CheckpointSource:
    """Find the files of a checkpoint and check their names, without reading any tensor.

    Args:
        path: folder or one `.safetensors` file.
        allow_links: follow symbolic links that lead out of the folder, as those of the Hugging Face cache do.

    Returns:
        A CheckpointSource.

    Raises:
        CheckpointError: nothing there; several files and no index, or several indexes; an index that is no JSON object
            of names, names a file outside the folder, or one that does not exist; a `.safetensors` file that the index
            does not name; a link out of the folder.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise CheckpointError(f"folder: expected a path, got {type(path).__name__}.")
    path = Path(path)
    if path.is_file():
        return _one_file(path.parent, path.name, allow_links)
    if not path.is_dir():
        raise CheckpointError(f"folder: expected a folder or a .safetensors file, got {str(path)!r}, which is neither.")
    indexes = sorted(p.name for p in path.iterdir() if p.name.endswith(INDEX_SUFFIX))
    files = sorted(p.name for p in path.iterdir() if p.name.endswith(".safetensors"))
    if len(indexes) > 1:
        raise CheckpointError(f"{path}: expected one index, got {listed(indexes)}. Remove all but one.")
    if not indexes:
        if len(files) != 1:
            raise CheckpointError(
                f"{path}: expected an index (*{INDEX_SUFFIX}) or exactly one .safetensors file, "
                f"got {len(files)} files and no index{': ' + listed(files) if files else ''}."
            )
        return _one_file(path, files[0], allow_links)
    return _indexed(path, indexes[0], files, allow_links)


def _one_file(folder: Path, file: str, allow_links: bool) -> CheckpointSource:
    if not file.endswith(".safetensors"):
        raise CheckpointError(f"folder: expected a folder or a .safetensors file, got {file!r}.")
    _check_inside(folder, file, allow_links)
    with _open(folder, file) as shard:
        return CheckpointSource(folder, dict.fromkeys(shard.keys(), file), None, allow_links)


def _indexed(folder: Path, index: str, files: list[str], allow_links: bool) -> CheckpointSource:
    file_of = _read_index(folder, index, allow_links)
    named = set(file_of.values())
    outside = sorted(name for name in named if not _is_plain_shard_name(name))
    if outside:
        raise CheckpointError(f"{index}: expected plain names of .safetensors files beside it, got {listed(outside)}.")
    missing = sorted(name for name in named if not (folder / name).is_file())
    if missing:
        lost = sorted(key for key, name in file_of.items() if name in set(missing))
        raise CheckpointError(
            f"{index}: expected every file it names, got none called {listed(missing)}, which hold {listed(lost)}. "
            "Fetch the missing shards."
        )
    stray = sorted(set(files) - named)
    if stray:
        raise CheckpointError(
            f"{folder}: expected only files that {index} names, got {listed(stray)} besides. "
            "Remove them or use their own index."
        )
    for name in sorted(named):
        _check_inside(folder, name, allow_links)
    return CheckpointSource(folder, file_of, index, allow_links)


def _read_index(folder: Path, index: str, allow_links: bool) -> dict[str, str]:
    _check_inside(folder, index, allow_links)
    size = (folder / index).stat().st_size
    if size > MAX_INDEX_BYTES:
        raise CheckpointError(f"{index}: expected an index of at most {MAX_INDEX_BYTES} bytes, got {size}.")
    try:
        text = (folder / index).read_bytes().decode()
        content = json.loads(text, object_pairs_hook=lambda pairs: _no_duplicates(index, pairs))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{index}: expected JSON, got {type(error).__name__} ({str(error)[:120]}).") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: expected an object with a 'weight_map' from keys to file names.")
    return weight_map


def _no_duplicates(index: str, pairs: list[tuple[str, object]]) -> dict[str, object]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted(name for name in unique if names.count(name) > 1) if len(names) < 1000 else ["(a long list)"]
        raise CheckpointError(f"{index}: expected each name once, got {listed(twice)} several times.")
    return unique


def _is_plain_shard_name(name: str) -> bool:
    return name.endswith(".safetensors") and not any(c in name for c in "/\\:\0") and not name.startswith(".")


def _check_inside(folder: Path, file: str, allow_links: bool) -> None:
    """Refuse links that lead out of the folder, unless allowed; the name itself is known to be plain."""
    if not allow_links and (folder / file).resolve().parent != folder.resolve():
        raise CheckpointError(
            f"{file}: expected a file inside {folder}, got a link to {(folder / file).resolve()}. "
            "Pass allow_links=True to follow it (the Hugging Face cache is made of such links)."
        )


def _open(folder: Path, file: str) -> safe_open:
    try:
        return safe_open(folder / file, framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{file}: expected a complete safetensors file, got {str(error)[:200]}. Fetch it again."
        ) from error


def _read_one(shard: safe_open, file: str, request: ReadRequest) -> int:
    """Read one tensor, give it to its sink and return its size in bytes."""
    try:
        if request.rows is None:
            tensor = shard.get_tensor(request.key)
        else:
            tensor = shard.get_slice(request.key)[request.rows[0] : request.rows[1]]
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file}: expected tensor {request.key!r}, got {str(error)[:200]}.") from error
    request.sink(tensor)
    return tensor.numel() * tensor.element_size()
