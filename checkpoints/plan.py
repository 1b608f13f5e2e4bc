"""Which tensors of a checkpoint make up one layer on one rank: names, shapes and dtypes, checked before any is read."""

from __future__ import annotations

from dataclasses import dataclass

from checkpoints.errors import CheckpointError, listed
from checkpoints.files import CheckpointSource, TensorMeta
from checkpoints.fp4 import FP4_BLOCK
from checkpoints.layouts import BLOCK, scale_shape
from checkpoints.names import Family, NameTable, TensorName
from checkpoints.scales import SCALE_DTYPES

PLAIN_DTYPES = ("BF16", "F16", "F32")
FP8_DTYPE = "F8_E4M3"
FP4_DTYPES = ("I8", "U8", "F4")
NO_SCALE = "got none"
FETCH_SCALES = "The bytes mean nothing without it: fetch the shard that holds it, or the checkpoint, again."
ONCE_ROLES = ("router", "correction_bias", "tid2eid")


@dataclass(frozen=True)
class Matrix:
    """One weight matrix of one expert: where it is stored and which part of the layer it becomes.

    Attributes:
        role: gate, up, gate_up or down.
        index: position of the expert in its group.
        key: name of the weight.
        scale_key: name of its scale if the checkpoint has one.
        scale_name: what its scale is called in this family.
        packed_idx: position of the expert in a tensor of all experts, or None for a tensor of its own.
    """

    role: str
    index: int
    key: str
    scale_key: str | None
    scale_name: str
    packed_idx: int | None = None

    @property
    def rows(self) -> tuple[int, int] | None:
        """The part of the stored tensor to read."""
        return None if self.packed_idx is None else (self.packed_idx, self.packed_idx + 1)


@dataclass(frozen=True)
class GroupPlan:
    """A group of experts of equal shape and encoding, ready to be read.

    Attributes:
        matrices: all of them.
        num_experts: of the group (1 for shared experts).
        intermediate_size: I.
        hidden_size: H.
        weight_dtype: as stored.
        scale_dtype: as stored, or None.
    """

    matrices: list[Matrix]
    num_experts: int
    intermediate_size: int
    hidden_size: int
    weight_dtype: str
    scale_dtype: str | None

    @property
    def is_fp4(self) -> bool:
        return self.weight_dtype in FP4_DTYPES


def parse_layer(source: CheckpointSource, family: Family, name: str, layer: int) -> tuple[set[TensorName], int]:
    """Parse all names of a layer and check that they are exactly what the family has.

    Args:
        source: the checkpoint.
        family: what to expect.
        name: the family's name, for messages.
        layer: the layer's number.

    Returns:
        The names, and the number of experts E.

    Raises:
        CheckpointError: missing and unknown keys, all at once.
    """
    table = family.table
    keys = source.keys_under(table.layer_prefix(layer))
    parsed = {key: table.parse(key) for key in keys}
    names = {found for found in parsed.values() if found is not None}
    num_experts = len({found.expert for found in names if found.expert is not None})  # so the last of them is E - 1

    def is_unknown(found: TensorName | None) -> bool:
        return found is None or _need(family, found.role) == "absent" or (found.expert or 0) >= max(num_experts, 1)

    unknown = [key for key, found in parsed.items() if is_unknown(found)]
    absent = [want for want in _required(family, layer, num_experts, names) if want not in names]
    missing = [table.key(*_args(want)) for want in absent]
    if family.one_of and not any(TensorName(role, layer) in names for role in family.one_of):
        missing.append(" or ".join(table.key(role, layer) for role in family.one_of))
    if absent and not unknown and len(absent) == len(missing) and all(want.role.endswith("_scale") for want in absent):
        raise CheckpointError(_without_scale(source, table, absent))
    if unknown or missing:
        problems = [f"no {listed(missing)}"] if missing else []
        problems += [f"unknown {listed(unknown)}"] if unknown else []
        where = source.index or sorted(set(source.file_of.values()))[0]
        raise CheckpointError(
            f"{where}: expected the MoE tensors of layer {layer} in the names of {name}, got {' and '.join(problems)}. "
            "Is it a dense layer, another family or an incomplete checkpoint?"
        )
    return names, num_experts


def _without_scale(source: CheckpointSource, table: NameTable, absent: list[TensorName]) -> str:
    """The message for weights whose scale is not there: file and key of the first, how many more, what to do."""
    role, layer, expert = _args(absent[0])
    weight, scale = table.key(role.removesuffix("_scale"), layer, expert), table.key(role, layer, expert)
    where = source.index or "the checkpoint"
    more = f" ({len(absent) - 1} more have none)" if len(absent) > 1 else ""
    return (
        f"{source.file_of.get(weight, where)}: {weight}: expected its scale {scale!r} in {where}, got none{more}. "
        f"{FETCH_SCALES}"
    )


def _args(name: TensorName) -> tuple[str, int, int | None]:
    return name.role, name.layer, name.expert


def _need(family: Family, role: str) -> str:
    if role.startswith("shared_"):
        return family.shared
    return {"correction_bias": family.correction_bias, "tid2eid": family.tid2eid}.get(role, "required")


def _required(family: Family, layer: int, num_experts: int, names: set[TensorName]) -> list[TensorName]:
    """What must be there: the family's own, and scales wherever one expert, or one shared part, has them."""
    roles = [role for role in family.table.roles if not role.endswith("_scale") and _need(family, role) == "required"]
    if family.shared == "optional" and any(name.role.startswith("shared_") for name in names):
        roles += ["shared_gate", "shared_up", "shared_down"]
    groups = [[role for role in family.table.roles if role.startswith("shared_") == shared] for shared in (True, False)]
    for group in groups:
        scales = [role for role in group if role.endswith("_scale")]
        if any(name.role in scales for name in names):
            roles += scales
    wanted = []
    for role in roles:
        if "{expert}" in family.table.roles[role]:
            wanted += [TensorName(role, layer, expert) for expert in range(max(num_experts, 1))]
        else:
            wanted.append(TensorName(role, layer))
    return wanted


def group_matrices(table: NameTable, names: set[TensorName], layer: int, experts: range | None) -> list[Matrix]:
    """The matrices of `experts`, or of the shared experts for None."""
    before = "shared_" if experts is None else ""
    packed = table.is_packed and experts is not None
    matrices = []
    for role in ("gate_up", "down") if packed else ("gate", "up", "down"):
        for index, expert in enumerate(experts if experts is not None else [None]):
            number = None if packed else expert
            scale = TensorName(f"{before}{role}_scale", layer, number)
            matrices.append(
                Matrix(
                    role,
                    index,
                    table.key(before + role, layer, number),
                    table.key(*_args(scale)) if scale in names else None,
                    table.key(*_args(scale)),
                    expert if packed else None,
                )
            )
    return matrices


def check_group(matrices: list[Matrix], metas: dict[str, TensorMeta], num_experts: int, hidden: int) -> GroupPlan:
    """Check dtypes and shapes of a group against each other and against H.

    Args:
        matrices: of one group, not empty.
        metas: dtype and shape of all their keys.
        num_experts: leading dimension of packed tensors.
        hidden: H.

    Raises:
        CheckpointError: every violation, each with file and key.
    """
    first = metas[matrices[0].key]
    rows = first.shape[-2] if len(first.shape) >= 2 else 0
    if matrices[0].role == "gate_up" and rows % 2:
        raise CheckpointError(f"{first.file}: {first.key}: expected [E, 2I, H], got shape {list(first.shape)}.")
    inter = rows // 2 if matrices[0].role == "gate_up" else rows
    shapes = {"gate": (inter, hidden), "up": (inter, hidden), "gate_up": (2 * inter, hidden), "down": (hidden, inter)}
    scales = {metas[m.scale_key].dtype for m in matrices if m.scale_key is not None}
    problems: list[str] = []
    for matrix in matrices:
        meta = metas[matrix.key]
        if meta.dtype != first.dtype:
            problems.append(f"{meta.file}: {meta.key}: expected {first.dtype} as in {first.key}, got {meta.dtype}")
        n, k = shapes[matrix.role]
        lead = () if matrix.packed_idx is None else (num_experts,)
        want = (*lead, n, k // 2) if first.dtype in ("I8", "U8") else (*lead, n, k)
        if meta.shape != want or 0 in want:
            problems.append(f"{meta.file}: {meta.key}: expected shape {list(want)}, got {list(meta.shape)}")
        problems += _check_scale(matrix, meta, metas, (n, k), lead)
    if len(scales) > 1:
        problems.append(f"{first.key}: expected one scale dtype in the layer, got {', '.join(sorted(scales))}")
    if problems:
        unique = list(dict.fromkeys(problems))
        text = "; ".join(unique[:6]) + (f"; and {len(unique) - 6} more." if len(unique) > 6 else ".")
        raise CheckpointError(text + (f" {FETCH_SCALES}" if unique[0].endswith(NO_SCALE) else ""))
    count = len({matrix.index for matrix in matrices})
    return GroupPlan(matrices, count, inter, hidden, first.dtype, next(iter(scales), None))


def _check_scale(
    matrix: Matrix, meta: TensorMeta, metas: dict[str, TensorMeta], shape: tuple[int, int], lead: tuple[int, ...]
) -> list[str]:
    """What is wrong with the scale of one matrix, given the dtype of its weight."""
    where = f"{meta.file}: {meta.key}"
    if meta.dtype in PLAIN_DTYPES:
        return (
            [f"{where}: expected no scale of a {meta.dtype} weight, got {matrix.scale_key}"] if matrix.scale_key else []
        )
    if meta.dtype != FP8_DTYPE and meta.dtype not in FP4_DTYPES:
        known = ", ".join((*PLAIN_DTYPES, FP8_DTYPE))
        return [f"{where}: expected a weight of {known} or packed FP4 ({', '.join(FP4_DTYPES)}), got {meta.dtype}"]
    if matrix.scale_key is None:
        return [f"{where}: expected its scale {matrix.scale_name!r} for {meta.dtype}, {NO_SCALE}"]
    scale = metas[matrix.scale_key]
    problems: list[str] = []
    dtypes: tuple[str, ...]
    where = f"{scale.file}: {scale.key}"
    n, k = shape
    if meta.dtype in FP4_DTYPES:
        if matrix.packed_idx is not None or k % FP4_BLOCK:
            problems.append(f"{where}: expected FP4 experts in tensors of their own, K a multiple of 32, got K = {k}")
        want, dtypes, blocks = (n, k // FP4_BLOCK), ("F8_E8M0", "U8"), "1 x 32"
    else:
        if matrix.role == "gate_up" and (n // 2) % BLOCK:
            problems.append(
                f"{where}: expected I to be a multiple of {BLOCK}, as gate and up share this grid, got I = {n // 2}"
            )
        want, dtypes, blocks = scale_shape(n, k), SCALE_DTYPES, "128 x 128"
    if scale.dtype not in dtypes:
        problems.append(f"{where}: expected a scale of dtype {', '.join(dtypes)}, got {scale.dtype}")
    if scale.shape != (*lead, *want):
        problems.append(
            f"{where}: expected shape {[*lead, *want]} ({blocks} blocks of {n} x {k}), got {list(scale.shape)}"
        )
    return problems


def check_once(names: dict[str, str], metas: dict[str, TensorMeta], num_experts: int) -> int:
    """Check the router's tensors and return H.

    Args:
        names: role -> key of those that are there; "router" always is.
        metas: of these keys.
        num_experts: E, as the experts' names have it.

    Raises:
        CheckpointError: a wrong shape or dtype.
    """
    problems = []
    router = metas[names["router"]]
    if len(router.shape) != 2 or router.shape[0] != num_experts or num_experts == 0 or router.dtype not in PLAIN_DTYPES:
        problems.append((router, f"[{num_experts}, H] of {', '.join(PLAIN_DTYPES)} for {num_experts} named experts"))
    bias = metas.get(names.get("correction_bias", ""))
    if bias is not None and (bias.shape != (num_experts,) or bias.dtype not in PLAIN_DTYPES):
        problems.append((bias, f"[{num_experts}] of {', '.join(PLAIN_DTYPES)}"))
    table = metas.get(names.get("tid2eid", ""))
    if table is not None and (len(table.shape) != 2 or table.dtype not in ("I32", "I64")):
        problems.append((table, "[vocabulary, K] of I32, I64"))
    if problems:
        raise CheckpointError(
            "; ".join(f"{m.file}: {m.key}: expected {want}, got {list(m.shape)} of {m.dtype}" for m, want in problems)
            + "."
        )
    return router.shape[1]
