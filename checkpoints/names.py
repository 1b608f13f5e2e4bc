"""The names that model families give to the tensors of one MoE layer, as tables that work both ways."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from checkpoints.errors import CheckpointError

Need = Literal["required", "optional", "absent"]


@dataclass(frozen=True)
class TensorName:
    """One tensor of a MoE layer: its role, and the expert it belongs to (None for what a layer has once)."""

    role: str
    layer: int
    expert: int | None = None


@dataclass(frozen=True)
class NameTable:
    """Names of one naming scheme.

    Attributes:
        name: how the scheme is called in messages.
        prefix: what all names of a layer start with; `{layer}` stands for its number.
        roles: role -> name after the prefix; `{expert}` stands for the expert's number. Roles of weights are gate, up,
            down (per expert), gate_up, down (packed), shared_gate, shared_up, shared_down; with `_scale` appended, of
            their scales; router, correction_bias and tid2eid (token id to expert ids) of the router.
        is_packed: all experts lie in one tensor [E, 2I, H] and one [E, H, I].
    """

    name: str
    prefix: str
    roles: dict[str, str]
    is_packed: bool = False

    def layer_prefix(self, layer: int) -> str:
        """The prefix of one layer, with its closing dot (so that layer 1 is no prefix of layer 10)."""
        return self.prefix.format(layer=layer)

    def key(self, role: str, layer: int, expert: int | None = None) -> str:
        """The key of a tensor."""
        return self.layer_prefix(layer) + self.roles[role].format(expert=expert)

    def parse(self, key: str) -> TensorName | None:
        """The tensor that a key names, or None if it is not one of this table: the inverse of `key`."""
        for role, template in self.roles.items():
            numbers = _match(self.prefix + template, key)
            if numbers is not None:
                return TensorName(role, numbers["layer"], numbers.get("expert"))
        return None


@dataclass(frozen=True)
class Family:
    """What the layers of one model family hold, beside the routed experts."""

    table: NameTable
    correction_bias: Need
    shared: Need
    tid2eid: Need = "absent"
    one_of: tuple[str, ...] = ()
    """Roles of which a layer has at least one."""


def _match(template: str, key: str) -> dict[str, int] | None:
    """Numbers of the placeholders if `key` is the template filled in, compared part by part between dots."""
    template_parts, key_parts = template.split("."), key.split(".")
    if len(template_parts) != len(key_parts):
        return None
    numbers: dict[str, int] = {}
    for expected, part in zip(template_parts, key_parts, strict=True):
        if expected.startswith("{"):
            if not (part.isascii() and part.isdigit() and len(part) < 10 and part == str(int(part))):
                return None
            numbers[expected[1:-1]] = int(part)
        elif part != expected:
            return None
    return numbers


def _experts(gate: str, up: str, down: str, scale: str) -> dict[str, str]:
    """Roles of routed and shared experts whose three weights lie in tensors of their own."""
    roles = {}
    for role, part in (("gate", gate), ("up", up), ("down", down)):
        for before, owner in (("", "experts.{expert}."), ("shared_", "shared_experts.")):
            roles[before + role] = f"{owner}{part}.weight"
            roles[f"{before}{role}_scale"] = f"{owner}{part}.{scale}"
    return roles


_PROJECTIONS = _experts("gate_proj", "up_proj", "down_proj", "weight_scale_inv")
_ROUTER = {
    "router": "gate.weight",
    "correction_bias": "gate.e_score_correction_bias",
    "tid2eid": "gate.tid2eid",
}

PER_EXPERT = NameTable("mlp.experts.N.gate_proj", "model.layers.{layer}.mlp.", {**_PROJECTIONS, **_ROUTER})
PACKED = NameTable(
    "mlp.experts.gate_up_proj",
    "model.layers.{layer}.mlp.",
    {
        "gate_up": "experts.gate_up_proj",
        "gate_up_scale": "experts.gate_up_proj_scale_inv",
        "down": "experts.down_proj",
        "down_scale": "experts.down_proj_scale_inv",
        **{role: name for role, name in _PROJECTIONS.items() if role.startswith("shared_")},
        **_ROUTER,
    },
    is_packed=True,
)
FFN = NameTable(
    "ffn.experts.N.w1",
    "layers.{layer}.ffn.",
    {
        **_experts("w1", "w3", "w2", "scale"),
        "router": "gate.weight",
        "correction_bias": "gate.bias",
        "tid2eid": "gate.tid2eid",
    },
)
TABLES = (PER_EXPERT, PACKED, FFN)

_BIASED = Family(PER_EXPERT, correction_bias="required", shared="required")
FAMILIES: dict[str, Family] = {
    "deepseek-v2": Family(PER_EXPERT, correction_bias="absent", shared="required"),
    "deepseek-v3": _BIASED,
    "deepseek-r1": _BIASED,
    "deepseek-v3.1": _BIASED,
    "deepseek-v3.2": _BIASED,
    "kimi-k2": _BIASED,
    "glm-4.5": _BIASED,
    "glm-5": _BIASED,
    "qwen3-moe": Family(PER_EXPERT, correction_bias="absent", shared="absent"),
    "packed": Family(PACKED, correction_bias="optional", shared="optional", tid2eid="optional"),
    "deepseek-v4": Family(
        FFN,
        correction_bias="optional",
        shared="required",
        tid2eid="optional",
        one_of=("correction_bias", "tid2eid"),
    ),
}
"""Families by name. `packed` are the names of transformers' own modules, whatever the model."""


def family_of(name: str, layer: int, keys: Iterable[str]) -> tuple[str, Family]:
    """The family to read a layer with.

    Args:
        name: a name of FAMILIES, or "auto": found from the names of the layer's own tensors.
        layer: the layer's number.
        keys: all keys of the checkpoint.

    Returns:
        The family's name and the family.

    Raises:
        CheckpointError: unknown name; no table, or several, fit the layer's keys.
    """
    if name != "auto":
        if name not in FAMILIES:
            raise CheckpointError(f"family: expected 'auto' or one of {', '.join(FAMILIES)}, got {name!r}.")
        return name, FAMILIES[name]
    keys = list(keys)
    fitting = []
    for table in TABLES:
        roles = {parsed.role for key in keys if (parsed := _of_layer(table, key, layer)) is not None}
        if roles & {"gate", "up", "down", "gate_up"}:
            fitting.append((table, roles))
    if len(fitting) != 1:
        found = " and ".join(table.name for table, _ in fitting) or "none"
        raise CheckpointError(
            f"layer: expected the experts of layer {layer} under one of the names "
            f"{', '.join(table.name for table in TABLES)}, got {found}. Is it a dense layer?"
        )
    table, roles = fitting[0]
    if table is PACKED:
        return "packed", FAMILIES["packed"]
    if table is FFN:
        return "deepseek-v4", FAMILIES["deepseek-v4"]
    has_shared = any(role.startswith("shared_") for role in roles)
    if "correction_bias" in roles:
        return "deepseek-v3", FAMILIES["deepseek-v3"]
    return ("deepseek-v2", FAMILIES["deepseek-v2"]) if has_shared else ("qwen3-moe", FAMILIES["qwen3-moe"])


def _of_layer(table: NameTable, key: str, layer: int) -> TensorName | None:
    return table.parse(key) if key.startswith(table.layer_prefix(layer)) else None
