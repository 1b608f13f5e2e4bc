"""Load one MoE layer, this rank's experts only, from a checkpoint: everything is checked before anything is read."""

from __future__ import annotations

from pathlib import Path

import torch

from checkpoints import fp4
from checkpoints.errors import CheckpointError
from checkpoints.files import WINDOW_BYTES, CheckpointSource, ReadRequest, open_source
from checkpoints.layouts import BLOCK, ExpertGroup, MoELayerTensors, local_experts, scale_shape
from checkpoints.names import FAMILIES, TensorName, family_of
from checkpoints.plan import ONCE_ROLES, GroupPlan, Matrix, check_group, check_once, group_matrices, parse_layer
from checkpoints.scales import read_exponents, scale_to_fp32

TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
MODEL_TYPES = {
    "deepseek_v2": "deepseek-v2",
    "deepseek_v3": "deepseek-v3",
    "deepseek_v32": "deepseek-v3.2",
    "deepseek_v4": "deepseek-v4",
    "kimi_k2": "kimi-k2",
    "glm4_moe": "glm-4.5",
    "glm_moe_dsa": "glm-5",
    "qwen3_moe": "qwen3-moe",
}
"""`model_type` of config.json -> family; with family="auto" it says what a layer must hold."""


def load_moe_layer(
    folder: str | Path,
    layer: int,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    family: str = "auto",
    device: torch.device | str = "cpu",
    allow_links: bool = False,
) -> MoELayerTensors:
    """Read one MoE layer of a checkpoint: FP8 bytes as they are, scales as fp32, gate and up stacked.

    Args:
        folder: folder with an index and shards or with one `.safetensors` file, or such a file.
        layer: number of the layer in the model.
        rank: this process's number inside its expert-parallel group (not the global rank).
        num_ranks: size of that group; rank r reads experts r * E / num_ranks to (r + 1) * E / num_ranks - 1.
        family: a name of `FAMILIES`, or "auto": from the names in the checkpoint and its config.json if there is one.
        device: where the tensors go.
        allow_links: follow symbolic links out of the folder (the Hugging Face cache is made of them).

    Returns:
        MoELayerTensors. Peak memory is its size, plus one tensor of a shard, plus a small window.

    Raises:
        CheckpointError: with the names of files and keys, for anything missing, unknown, misplaced, of a wrong shape or
            dtype, or quantised in a way that is not understood. Nothing is returned then.

    Effects: reads files inside the folder only, unless links out of it are allowed; no state remains.
    """
    if not isinstance(layer, int) or isinstance(layer, bool):
        raise CheckpointError(f"layer: expected the number of a layer, got {layer!r}.")
    try:
        torch.device(device)
    except (RuntimeError, TypeError):
        raise CheckpointError(f"device: expected cpu, cuda or cuda:N, got {device!r}.") from None
    source = open_source(folder, allow_links=allow_links)
    model_type = _read_config(source)
    family_name, members = family_of(family, layer, source.file_of)
    configured = FAMILIES.get(MODEL_TYPES.get(model_type or "", ""))
    if family == "auto" and configured is not None and configured.table is members.table:
        family_name, members = MODEL_TYPES[model_type or ""], configured
    names, num_experts = parse_layer(source, members, family_name, layer)
    once = {r: members.table.key(r, layer) for r in ONCE_ROLES if TensorName(r, layer) in names}
    prefix = members.table.layer_prefix(layer)
    if members.table.is_packed:
        num_experts = (*source.metas([once["router"]], prefix)[once["router"]].shape, 0)[0]
    local = local_experts(num_experts, rank, num_ranks)

    groups = [group_matrices(members.table, names, layer, local)]
    if any(name.role.startswith("shared_") for name in names):
        groups.append(group_matrices(members.table, names, layer, None))
    keys = set(once.values()) | {key for group in groups for m in group for key in (m.key, m.scale_key) if key}
    metas = source.metas(sorted(keys), prefix)
    hidden = check_once(once, metas, num_experts)
    plans = [check_group(group, metas, num_experts, hidden) for group in groups]

    loaded = [_read_group(source, plan, torch.device(device)) for plan in plans]
    single = {role: source.tensor(key, device) for role, key in once.items()}
    return MoELayerTensors(
        layer=layer,
        family=family_name,
        num_experts=num_experts,
        first_expert=local.start,
        routed=loaded[0],
        shared=loaded[1] if len(loaded) > 1 else None,
        router_weight=single["router"],
        correction_bias=single.get("correction_bias"),
        tid2eid=single.get("tid2eid"),
    )


def _read_config(source: CheckpointSource) -> str | None:
    """The model_type of config.json beside the files, if there is one; refuses block sizes that are not 128 x 128."""
    config = source.config() or {}
    quantization = config.get("quantization_config")
    block = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if block not in (None, [BLOCK, BLOCK]):
        raise CheckpointError(f"config.json: expected weight_block_size [{BLOCK}, {BLOCK}], got {block}.")
    model_type = config.get("model_type")
    return model_type if isinstance(model_type, str) else None


def _read_group(source: CheckpointSource, plan: GroupPlan, device: torch.device) -> ExpertGroup:
    """Allocate a group's tensors and fill them."""
    n, inter, hidden = plan.num_experts, plan.intermediate_size, plan.hidden_size
    dtype = TORCH_DTYPES.get(plan.weight_dtype, torch.float8_e4m3fn)
    is_scaled = plan.scale_dtype is not None
    (rows13, cols13), (rows2, cols2) = scale_shape(inter, hidden), scale_shape(hidden, inter)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    group = ExpertGroup(
        w13=empty(n, 2 * inter, hidden, dtype=dtype),
        w2=empty(n, hidden, inter, dtype=dtype),
        w13_scale=empty(n, 2 * rows13, cols13) if is_scaled else None,
        w2_scale=empty(n, rows2, cols2) if is_scaled else None,
        weight_dtype=plan.weight_dtype,
        scale_dtype=plan.scale_dtype,
        w13_exponents=empty(n, 2 * inter, hidden // fp4.FP4_BLOCK, dtype=torch.uint8) if plan.is_fp4 else None,
        w2_exponents=empty(n, hidden, inter // fp4.FP4_BLOCK, dtype=torch.uint8) if plan.is_fp4 else None,
    )
    scales = [r for m in plan.matrices if (r := _scale_request(source, group, m)) is not None]
    weights = [_weight_request(group, m) for m in plan.matrices]
    window = min(WINDOW_BYTES, (group.w13.numel() + group.w2.numel()) * dtype.itemsize // 16)
    if plan.is_fp4:  # a weight is converted as it arrives, so its exponents must be there
        source.read(scales, window)
        source.read(weights, window)
    else:
        source.read([*scales, *weights], window)
    return group


def _part(stacked: torch.Tensor | None, down: torch.Tensor | None, matrix: Matrix) -> torch.Tensor:
    """The view of [gate; up] (`stacked`) or of `down` that one matrix fills."""
    whole = down if matrix.role == "down" else stacked
    assert whole is not None
    view = whole[matrix.index]
    half = view.shape[0] // 2
    return {"gate": view[:half], "up": view[half:]}.get(matrix.role, view)


def _scale_request(source: CheckpointSource, group: ExpertGroup, matrix: Matrix) -> ReadRequest | None:
    key = matrix.scale_key
    if key is None:
        return None
    file = source.file_of[key]
    if group.w13_exponents is not None:
        target = _part(group.w13_exponents, group.w2_exponents, matrix)
        return ReadRequest(key, lambda t: target.copy_(read_exponents(t, key, file)), matrix.rows)
    target = _part(group.w13_scale, group.w2_scale, matrix)
    return ReadRequest(key, lambda t: target.copy_(scale_to_fp32(t, key, file).view(target.shape)), matrix.rows)


def _weight_request(group: ExpertGroup, matrix: Matrix) -> ReadRequest:
    target = _part(group.w13, group.w2, matrix)
    if group.w13_exponents is None:
        return ReadRequest(matrix.key, lambda t: target.copy_(t.view(target.shape)), matrix.rows)
    exponents = _part(group.w13_exponents, group.w2_exponents, matrix)
    scale = _part(group.w13_scale, group.w2_scale, matrix)

    def convert(packed: torch.Tensor) -> None:
        data, shift = fp4.fp4_to_e4m3(packed, exponents.cpu(), matrix.key)
        target.copy_(data)
        scale.copy_(fp4.exponent_to_scale(shift))

    return ReadRequest(matrix.key, convert, matrix.rows)
