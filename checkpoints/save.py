"""Write loaded layers back under a family's names: the same keys, dtypes and bytes that were read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from checkpoints import fp4
from checkpoints.errors import CheckpointError, listed
from checkpoints.files import INDEX_SUFFIX
from checkpoints.layouts import BLOCK, ExpertGroup, MoELayerTensors, split_gate_up
from checkpoints.names import FAMILIES, NameTable
from checkpoints.scales import scale_from_fp32

MAX_SHARD_BYTES = 1 << 30
INDEX_NAME = "model" + INDEX_SUFFIX
FP4_TORCH_DTYPES = {"I8": "int8", "U8": "uint8", "F4": "float4_e2m1fn_x2"}


def save_moe_layer(
    folder: str | Path,
    tensors: MoELayerTensors,
    *,
    family: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[str]:
    """Write this rank's experts of one layer; the rank with expert 0 also writes what all ranks hold.

    Args:
        folder: made if it does not exist. All ranks may write into one.
        tensors: as load_moe_layer returned them, perhaps with other values in them.
        family: names to write under; None: those it was read with.
        max_shard_bytes: a new file is begun where the next tensor would exceed it.

    Returns:
        The files written. Call `write_index` once after all layers and ranks have been saved.

    Raises:
        CheckpointError: an unknown family; names that pack all experts into one tensor while this rank has only some of
            them, or whose packed scales can't hold a partial block; scales or FP4 values that the stored dtype can't
            hold exactly.

    Effects: each file appears complete or not at all. Needs memory for one file besides.
    """
    name = family or tensors.family
    if name not in FAMILIES:
        raise CheckpointError(f"family: expected one of {', '.join(FAMILIES)}, got {name!r}.")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    last = tensors.first_expert + tensors.routed.w13.shape[0] - 1
    stem = f"layer-{tensors.layer:05d}-experts-{tensors.first_expert:05d}-{last:05d}"
    files: list[str] = []
    pending: dict[str, torch.Tensor] = {}
    size = 0
    for key, tensor in named_tensors(tensors, FAMILIES[name].table):
        if pending and size + tensor.nbytes > max_shard_bytes:
            files.append(write_shard(folder, f"{stem}-{len(files) + 1:05d}.safetensors", pending))
            pending, size = {}, 0
        pending[key] = tensor.contiguous()
        size += tensor.nbytes
    files.append(write_shard(folder, f"{stem}-{len(files) + 1:05d}.safetensors", pending))
    return files


def write_index(folder: str | Path) -> Path:
    """Write the index of all `.safetensors` files of a folder; its `total_size` is that of their tensors in bytes.

    Returns:
        The index file.

    Raises:
        CheckpointError: no files; a broken file; a key in two files.
    """
    folder = Path(folder)
    weight_map: dict[str, str] = {}
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as shard:
                keys = list(shard.keys())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path.name}: expected a complete safetensors file, got {error}.") from error
        twice = [key for key in keys if key in weight_map]
        if twice:
            other = weight_map[twice[0]]
            raise CheckpointError(f"{path.name}: expected each key in one file, got {listed(twice)} in {other} too.")
        weight_map.update(dict.fromkeys(keys, path.name))
        total += _tensor_bytes(path)
    if not weight_map:
        raise CheckpointError(f"{folder}: expected .safetensors files, got none. Save the layers first.")
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    temporary = folder / f".{INDEX_NAME}.{os.getpid()}"
    temporary.write_text(json.dumps(index, indent=1) + "\n")
    os.replace(temporary, folder / INDEX_NAME)
    return folder / INDEX_NAME


def named_tensors(tensors: MoELayerTensors, table: NameTable) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a layer under the names of `table`, as the checkpoint stores them, one at a time."""
    layer = tensors.layer
    if tensors.first_expert == 0:
        once = {"router": tensors.router_weight, "correction_bias": tensors.correction_bias, "tid2eid": tensors.tid2eid}
        for role, tensor in once.items():
            if tensor is not None:
                yield table.key(role, layer), tensor
        if tensors.shared is not None:
            for role, tensor in _expert(tensors.shared, 0):
                yield table.key("shared_" + role, layer), tensor
    if table.is_packed:
        yield from _packed(tensors, table)
        return
    for index in range(tensors.routed.w13.shape[0]):
        for role, tensor in _expert(tensors.routed, index):
            yield table.key(role, layer, tensors.first_expert + index), tensor


def _packed(tensors: MoELayerTensors, table: NameTable) -> Iterator[tuple[str, torch.Tensor]]:
    group = tensors.routed
    if group.w13.shape[0] != tensors.num_experts:
        raise CheckpointError(
            f"family: expected all {tensors.num_experts} experts on one rank for packed names, got "
            f"{group.w13.shape[0]}. Save per expert, for instance as 'deepseek-v3'."
        )
    if group.w13_exponents is not None:
        raise CheckpointError("family: expected names with one tensor per expert for FP4 weights, got packed ones.")
    if group.w13_scale is not None and group.intermediate_size % BLOCK:
        raise CheckpointError(
            f"family: expected I to be a multiple of {BLOCK} for packed names, as gate and up share a scale grid "
            f"there, got I = {group.intermediate_size}. Save per expert, for instance as 'deepseek-v3'."
        )
    for role, weight, scale in (("gate_up", group.w13, group.w13_scale), ("down", group.w2, group.w2_scale)):
        yield table.key(role, tensors.layer), weight
        if scale is not None:
            yield table.key(role + "_scale", tensors.layer), scale_from_fp32(scale, group.scale_dtype or "F32")


def _expert(group: ExpertGroup, index: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Role and stored form of the weights and scales of one expert."""
    for role in ("gate", "up", "down"):
        weight = _matrix(group.w13, group.w2, role, index)
        scale = _matrix(group.w13_scale, group.w2_scale, role, index)
        exponents = _matrix(group.w13_exponents, group.w2_exponents, role, index)
        assert weight is not None
        if exponents is not None and scale is not None:
            packed = fp4.e4m3_to_fp4(weight, fp4.scale_to_exponent(scale), exponents)
            yield role, packed.view(getattr(torch, FP4_TORCH_DTYPES[group.weight_dtype]))
            yield role + "_scale", exponents if group.scale_dtype == "U8" else exponents.view(torch.float8_e8m0fnu)
            continue
        yield role, weight
        if scale is not None:
            yield role + "_scale", scale_from_fp32(scale, group.scale_dtype or "F32")


def _matrix(w13: torch.Tensor | None, w2: torch.Tensor | None, role: str, index: int) -> torch.Tensor | None:
    if w13 is None or w2 is None:
        return None
    if role == "down":
        return w2[index]
    return split_gate_up(w13[index])[0 if role == "gate" else 1]


def _tensor_bytes(path: Path) -> int:
    """What a complete file holds behind its header, whose length is its first 8 bytes."""
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    return path.stat().st_size - 8 - header


def write_shard(folder: Path, file: str, tensors: dict[str, torch.Tensor]) -> str:
    """Write one file, which appears complete or not at all; returns its name."""
    temporary = folder / f".{file}.{os.getpid()}"
    try:
        save_file({key: t.cpu() for key, t in tensors.items()}, temporary, metadata={"format": "pt"})
        os.replace(temporary, folder / file)
    finally:
        temporary.unlink(missing_ok=True)
    return file
