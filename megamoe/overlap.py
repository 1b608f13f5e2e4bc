"""How a layer overlaps its work, frozen; files of settings that `megamoe tune` measured, and how a layer reads them."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch

from megamoe.errors import MegaMoETypeError, MegaMoEValueError, expected
from megamoe.provenance import gpu_name, kernel_hash
from megamoe.recipe import Recipe

WgradMode = Literal["inline", "stream", "delayed"]
"""When weight gradients are computed.

"inline": on the caller's stream; they are finished when backward returns and go through autograd. "stream": on another
stream, beside what the backward does next; finished when `backward()` returns. "delayed": when `backward_dw()` is
called. The last two write `.grad` themselves, or add to `main_grad` where the parameter has one.
"""

FORMAT = 1
"""Version of the file."""


@dataclasses.dataclass(frozen=True)
class OverlapConfig:
    """What runs beside what. Hashable. No field changes a bit of any result.

    Args:
        wgrad: when weight gradients are computed. "inline": they are finished when backward returns and go through
            autograd. "stream": they are computed on another stream beside the rest of the backward, and
            finished when `backward()` returns. "delayed": they wait for `backward_dw()`. The last two write `.grad` or
            add to `main_grad` themselves; hooks of the parameters don't see them.
        steal_us: fused kernels on several ranks, with wgrad="inline" and FP8 operands of weight gradients: while dx is
            in flight, the kernel that computes it takes tasks of dW13 that are estimated to last at most so many
            microseconds, up to 1000. It costs P * (H + 2I) bytes. 0: none.
        reserve_sms: fused kernels only: SMs that their launches leave to other kernels. All ranks need the same.
        lag: fused kernels only: blocks of 128 rows in a group of the schedule: a group's second GEMM trails its first
            by one group. 0: chosen from the sizes (16 for large experts).
        pull_batch: fused kernels only: rows that a CTA's communication warps pull at once, 1 to 16. 0: as many as
            shared memory holds, at most 8. More than it holds is refused when the kernel is made.

    Raises:
        MegaMoEValueError: for a value outside these.
    """

    wgrad: WgradMode = "inline"
    steal_us: float = 0.0
    reserve_sms: int = 0
    lag: int = 0
    pull_batch: int = 0

    def __post_init__(self) -> None:
        problems = []
        if self.wgrad not in get_args(WgradMode):
            problems.append(expected("wgrad", "'inline', 'stream' or 'delayed'", repr(self.wgrad)))
        if (
            not isinstance(self.steal_us, int | float)
            or isinstance(self.steal_us, bool)
            or not 0 <= self.steal_us <= 1000
        ):
            problems.append(expected("steal_us", "a number from 0 to 1000", repr(self.steal_us)))
        for name, most in (("reserve_sms", 64), ("lag", 1024), ("pull_batch", 16)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
                problems.append(expected(name, f"an integer from 0 to {most}", repr(value)))
        if problems:
            raise MegaMoEValueError("\n".join(problems))

    @property
    def tiling(self) -> dict[str, int]:
        """The choices that fused kernels are compiled for, by the names of their `TileConfig`; empty: its defaults."""
        chosen = {"group_blocks": self.lag, "pull_batch": self.pull_batch}
        return {name: value for name, value in chosen.items() if value}

    def __str__(self) -> str:
        """What differs from the defaults."""
        fields = [(f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self)]
        return ", ".join(f"{name}={value}" for name, value, default in fields if value != default) or "defaults"


Overlap: TypeAlias = "OverlapConfig | str | os.PathLike[str] | None"
"""Settings, or the file that has them."""


@dataclasses.dataclass(frozen=True)
class OverlapKey:
    """What settings were measured for. They are used where all of it is the same.

    Attributes:
        gpu: as `megamoe.provenance.gpu_name` says it.
        num_experts, hidden_size, intermediate_size, top_k: E over all ranks, H, I, K.
        ranks: R.
        recipe: its fields.
        kernel_hash: of the sources of the fused kernels.
    """

    gpu: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    ranks: int
    recipe: dict[str, Any]
    kernel_hash: str

    @classmethod
    def of(cls, device: torch.device, sizes: tuple[int, int, int, int], ranks: int, recipe: Recipe) -> OverlapKey:
        """That of this machine. `sizes`: E, H, I, K. A device that holds nothing stands for the current CUDA device."""
        if device.type == "meta":
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return cls(gpu_name(device), *sizes, ranks, dataclasses.asdict(recipe), str(kernel_hash("cute")))

    def __str__(self) -> str:
        shape = f"E={self.num_experts} H={self.hidden_size} I={self.intermediate_size} K={self.top_k}"
        recipe = ", ".join(str(v) for v in self.recipe.values() if v is not None)
        return f"{shape} R={self.ranks} ({recipe}) on {self.gpu}"


def read_overlap(path: str | os.PathLike[str], key: OverlapKey) -> OverlapConfig:
    """The settings for `key` in a file that `megamoe tune` wrote.

    Raises:
        MegaMoEValueError: it is no such file, has nothing for this key, or was measured with other kernels.
    """
    found = [entry for entry in read_entries(path) if _is_for(entry, key)]
    if not found:
        got = "; ".join(str(_key(entry)) for entry in read_entries(path)) or "none"
        raise MegaMoEValueError(
            expected("overlap", f"settings for {key} in {os.fspath(path)!r}", got, "Run megamoe tune for this layer.")
        )
    for entry in found:
        if entry["kernel_hash"] == key.kernel_hash:
            return _settings(entry, path)
    hashes = ", ".join(entry["kernel_hash"] for entry in found)
    contract = f"settings of kernels {key.kernel_hash} in {os.fspath(path)!r}"
    raise MegaMoEValueError(expected("overlap", contract, f"those of {hashes}", "Run megamoe tune again."))


def write_overlap(path: str | os.PathLike[str], key: OverlapKey, overlap: OverlapConfig, facts: dict[str, Any]) -> None:
    """Put the settings for `key` into a file, in the place of those for the same layer, whatever their kernels.

    Args:
        path: of a file of this kind, or a new one.
        key, overlap: what for, and what.
        facts: what else to keep, as JSON takes it.
    """
    others = [e for e in read_entries(path) if not _is_for(e, key)] if Path(path).exists() else []
    entry = {**dataclasses.asdict(key), "overlap": dataclasses.asdict(overlap), **facts}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps({"megamoe_overlap": FORMAT, "settings": [*others, entry]}, indent=1) + "\n")


def read_entries(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All settings of a file as they stand there."""
    contract, name = "a file that megamoe tune wrote", os.fspath(path)
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise MegaMoEValueError(expected("overlap", contract, f"{name!r}: {error}")) from error
    if not isinstance(content, dict) or "megamoe_overlap" not in content:
        raise MegaMoEValueError(expected("overlap", contract, f"{name!r}, which is another kind of JSON"))
    if content["megamoe_overlap"] != FORMAT:
        got = f"format {content['megamoe_overlap']} in {name!r}"
        raise MegaMoEValueError(expected("overlap", f"format {FORMAT}", got, "Run megamoe tune again."))
    names = {field.name for field in dataclasses.fields(OverlapKey)} | {"overlap"}
    entries = content.get("settings")
    if not isinstance(entries, list):
        got = f"{type(entries).__name__} in {name!r}"
        raise MegaMoEValueError(expected("overlap", "a list of settings", got, "Run megamoe tune again."))
    for entry in entries:
        if not isinstance(entry, dict) or not names <= entry.keys():
            raise MegaMoEValueError(expected("overlap", f"settings with {', '.join(sorted(names))}", f"{name!r}"))
        kinds = {"overlap": dict, "recipe": dict, "kernel_hash": str}
        odd = [field for field, kind in kinds.items() if not isinstance(entry[field], kind)]
        if odd:
            got = f"other types of {', '.join(odd)} in {name!r}"
            raise MegaMoEValueError(expected("overlap", contract, got, "Run megamoe tune again."))
    return entries


def resolve_overlap(overlap: Overlap, key: Any) -> OverlapConfig:
    """The settings that a caller means.

    Args:
        overlap: settings, a file of them, or None: the defaults.
        key: gives the `OverlapKey` when it is called: only files need it.

    Raises:
        MegaMoETypeError: it is none of these. MegaMoEValueError: as `read_overlap`.
    """
    if overlap is None:
        return OverlapConfig()
    if isinstance(overlap, OverlapConfig):
        return overlap
    if isinstance(overlap, str | os.PathLike):
        return read_overlap(overlap, key())
    got = type(overlap).__name__
    raise MegaMoETypeError(expected("overlap", "an OverlapConfig, the path of a file with settings, or None", got))


def _key(entry: dict[str, Any]) -> OverlapKey:
    return OverlapKey(**{field.name: entry[field.name] for field in dataclasses.fields(OverlapKey)})


def _is_for(entry: dict[str, Any], key: OverlapKey) -> bool:
    """Whether all but the kernels is the same."""
    return dataclasses.replace(_key(entry), kernel_hash=key.kernel_hash) == key


def _settings(entry: dict[str, Any], path: str | os.PathLike[str]) -> OverlapConfig:
    known = {field.name for field in dataclasses.fields(OverlapConfig)}
    strange = sorted(set(entry["overlap"]) - known)
    if strange:
        contract = f"fields of OverlapConfig in {os.fspath(path)!r}"
        raise MegaMoEValueError(expected("overlap", contract, ", ".join(strange), "Run megamoe tune again."))
    return OverlapConfig(**entry["overlap"])
