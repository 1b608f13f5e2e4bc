"""Write an FP8 checkpoint (128 x 128 blocks, DeepSeek-V3 names) from a bf16 one, shard by shard."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

from checkpoints.errors import CheckpointError, listed
from checkpoints.files import CheckpointSource, open_source
from checkpoints.layouts import BLOCK, scale_shape
from checkpoints.names import PER_EXPERT
from checkpoints.save import write_index, write_shard

Quantizer = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A matrix [N, K] -> (float8_e4m3fn [N, K], fp32 [ceil(N / 128), ceil(K / 128)])."""

WEIGHT_SUFFIXES = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf")
"""Files of weights, and indexes of these: no copies of them belong beside the FP8 shards."""


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
    allow_links: bool = False,
) -> list[str]:
    """Quantise the selected weights of a checkpoint; its other tensors and small files are copied as they are.

    Args:
        source_folder: folder with bf16, fp16 or fp32 weights, or one file, of whose neighbours config.json is copied.
        target_folder: a folder that does not exist or is empty; gets the same shards, an index, and every file that
            holds no weights (tokenizer, templates, code); config.json gets a `quantization_config`. Subfolders stay.
        quantize: how one matrix is quantised.
        select: which keys; by default the weights of routed and shared experts.
        allow_links: follow symbolic links out of the folder (the Hugging Face cache is made of them).

    Returns:
        The keys that were quantised. Each has a neighbour, with "weight" replaced by "weight_scale_inv".

    Raises:
        CheckpointError: a broken source, a link that is not followed, a target that is not empty, nothing selected, a
            selected tensor that is no matrix of bf16, fp16 or fp32, or a quantiser that returns something else than
            described.

    Effects: holds one shard in memory at a time. The index is written last: a folder without one is incomplete.
    """
    source = open_source(source_folder, allow_links=allow_links)
    config = source.config()
    small_files = _small_files(source) if Path(source_folder).is_dir() else []
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
    for file, keys in sorted(by_file.items()):
        tensors: dict[str, torch.Tensor] = {}
        for key in sorted(keys):
            tensor = source.tensor(key)
            tensors.update(_quantized(key, tensor, quantize) if key in chosen else {key: tensor})
        write_shard(target, file, tensors)
    for path in small_files:
        shutil.copyfile(path, target / path.name)
    if config is not None:
        config["quantization_config"] = _quantization([key for key in metas if key not in chosen])
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_index(target)
    return sorted(chosen)


def _quantized(key: str, weight: torch.Tensor, quantize: Quantizer) -> dict[str, torch.Tensor]:
    data, scale = quantize(weight)
    want = scale_shape(*weight.shape)
    if data.dtype != torch.float8_e4m3fn or data.shape != weight.shape or scale.dtype != torch.float32:
        raise CheckpointError(f"quantize: expected float8_e4m3fn and fp32 scales, got {data.dtype} and {scale.dtype}.")
    if tuple(scale.shape) != want:
        raise CheckpointError(f"quantize: expected scales of shape {want} for {key}, got {tuple(scale.shape)}.")
    return {key: data.contiguous(), f"{key}_scale_inv": scale.contiguous()}


def _small_files(source: CheckpointSource) -> list[Path]:
    """All files of the folder that hold no weights, less config.json."""
    names = sorted(path.name for path in source.folder.iterdir() if not path.name.endswith(WEIGHT_SUFFIXES))
    paths = [source.beside(name) for name in names if name != "config.json"]
    return [path for path in paths if path is not None]


def _quantization(plain_keys: list[str]) -> dict[str, object]:
    """The quantization_config that names what was left alone."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted(
            {key.removesuffix(".weight") for key in plain_keys if key.endswith(".weight")}
        ),
    }
