"""Write an FP8 checkpoint (128 x 128 blocks, DeepSeek-V3 names) from a bf16 one, shard by shard."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from checkpoints.errors import CheckpointError, listed
from checkpoints.files import open_source
from checkpoints.layouts import BLOCK, scale_shape
from checkpoints.names import PER_EXPERT

Quantizer = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A matrix [N, K] -> (float8_e4m3fn [N, K], fp32 [ceil(N / 128), ceil(K / 128)])."""


def is_expert_weight(key: str) -> bool:
    """Whether a key is a weight of a routed or shared expert in DeepSeek-V3 names."""
    name = PER_EXPERT.parse(key)
    return name is not None and name.role.removeprefix("shared_") in ("gate", "up", "down")


def convert_to_fp8(
    source_folder: str | Path,
    target_folder: str | Path,
    quantize: Quantizer,
    *,
    select: Callable[[str], bool] = is_expert_weight,
) -> list[str]:
    """Quantise the selected weights of a checkpoint; everything else is copied as it is.

    Args:
        source_folder: folder (or file) with bf16, fp16 or fp32 weights.
        target_folder: a folder that does not exist or is empty; gets the same shards, an index and the small files.
        quantize: how one matrix is quantised.
        select: which keys; by default the weights of routed and shared experts.

    Returns:
        The keys that were quantised. Each has a neighbour, with "weight" replaced by "weight_scale_inv".

    Raises:
        CheckpointError: a broken source, a target that is not empty, nothing selected, a selected tensor that is no
            matrix of bf16, fp16 or fp32, or a quantiser that returns something else than described.

    Effects: holds one shard in memory at a time. The index is written last: a folder without one is incomplete.
    """
    source = open_source(source_folder)
    target = Path(target_folder)
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"target_folder: expected a new or empty folder, got {str(target)!r} with files in it.")
    chosen = {key for key in source.file_of if select(key)}
    metas = source.metas(source.file_of, "")
    wrong = [k for k in sorted(chosen) if metas[k].dtype not in ("BF16", "F16", "F32") or len(metas[k].shape) != 2]
    wrong += [key for key in sorted(chosen) if not key.endswith(".weight")]
    if wrong or not chosen:
        what = listed(wrong) if wrong else "nothing selected"
        raise CheckpointError(f"select: expected matrices '*.weight' of BF16, F16 or F32, got {what}.")
    target.mkdir(parents=True, exist_ok=True)
    by_file: dict[str, list[str]] = defaultdict(list)
    for key, file in source.file_of.items():
        by_file[file].append(key)
    weight_map: dict[str, str] = {}
    total = 0
    for file, keys in sorted(by_file.items()):
        tensors: dict[str, torch.Tensor] = {}
        for key in sorted(keys):
            tensor = source.tensor(key)
            tensors.update(_quantized(key, tensor, quantize) if key in chosen else {key: tensor})
        save_file(tensors, target / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
        total += sum(t.numel() * t.element_size() for t in tensors.values())
    _copy_small_files(source.folder, target, [key for key in metas if key not in chosen])
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    return sorted(chosen)


def _quantized(key: str, weight: torch.Tensor, quantize: Quantizer) -> dict[str, torch.Tensor]:
    data, scale = quantize(weight)
    want = scale_shape(*weight.shape)
    if data.dtype != torch.float8_e4m3fn or data.shape != weight.shape or scale.dtype != torch.float32:
        raise CheckpointError(f"quantize: expected float8_e4m3fn and fp32 scales, got {data.dtype} and {scale.dtype}.")
    if tuple(scale.shape) != want:
        raise CheckpointError(f"quantize: expected scales of shape {want} for {key}, got {tuple(scale.shape)}.")
    return {key: data.contiguous(), f"{key}_scale_inv": scale.contiguous()}


def _copy_small_files(source: Path, target: Path, plain_keys: list[str]) -> None:
    """Copy configuration and tokenizer files; config.json gets a quantization_config that names what was left alone."""
    for path in sorted(source.glob("*.json")):
        if path.name.endswith(".index.json") or path.is_symlink() or not path.is_file():
            continue
        if path.name != "config.json":
            shutil.copyfile(path, target / path.name)
            continue
        config = json.loads(path.read_text())
        plain_modules = sorted({key.removesuffix(".weight") for key in plain_keys if key.endswith(".weight")})
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": plain_modules,
        }
        (target / path.name).write_text(json.dumps(config, indent=2) + "\n")
