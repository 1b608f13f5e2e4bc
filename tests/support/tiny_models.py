"""Tiny random models of the families on transformers' experts interface, and comparisons of two of them."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import nn

from megamoe.gates import GATES, sqnr_db

VOCAB, H, INTER, E, K = 64, 128, 128, 8, 2
LEAST_DB = {name: gate.tensor_db for name, gate in GATES.items()}

_COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=H,
    intermediate_size=128,
    moe_intermediate_size=INTER,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=64,
    num_experts_per_tok=K,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    initializer_range=H**-0.5,
)
_MLA: dict[str, Any] = dict(
    num_key_value_heads=2, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16
)
_GROUPS: dict[str, Any] = dict(n_routed_experts=E, n_group=4, topk_group=2, first_k_dense_replace=1)
_HEADS: dict[str, Any] = dict(num_key_value_heads=1, head_dim=32)

FAMILIES = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "deepseek_v4_hash",
    "qwen3_moe",
    "glm4_moe",
)


def config_of(family: str) -> Any:
    """A configuration with one MoE layer, so that rounding in it cannot change the choice of experts in another."""
    if family == "deepseek_v2":
        return transformers.DeepseekV2Config(
            **_COMMON, **_MLA, **_GROUPS, n_shared_experts=2, topk_method="group_limited_greedy"
        )
    if family == "deepseek_v3":
        return transformers.DeepseekV3Config(**_COMMON, **_MLA, **_GROUPS, n_shared_experts=1)
    if family == "deepseek_v32":
        index = dict(index_n_heads=2, index_head_dim=32, index_topk=64)
        return transformers.DeepseekV32Config(**_COMMON, **_MLA, **_GROUPS, **index, n_shared_experts=1)
    if family in ("deepseek_v4", "deepseek_v4_hash"):
        small = dict(q_lora_rank=32, o_lora_rank=16, head_dim=64, index_n_heads=2, index_head_dim=32, o_groups=2)
        types = ["hash_moe" if family == "deepseek_v4_hash" else "moe"]
        one = {**_COMMON, "num_hidden_layers": 1}
        return transformers.DeepseekV4Config(
            **one, **small, n_routed_experts=E, n_shared_experts=1, mlp_layer_types=types, swiglu_limit=6.0
        )
    if family == "qwen3_moe":
        return transformers.Qwen3MoeConfig(**_COMMON, **_HEADS, num_experts=E, mlp_only_layers=[0], norm_topk_prob=True)
    return transformers.Glm4MoeConfig(
        **_COMMON, **_HEADS, **{**_GROUPS, "n_group": 1, "topk_group": 1}, n_shared_experts=1
    )


def make_model(family: str) -> Any:
    """An fp32 model in eval mode on the eager path; its experts' weights are exact in bf16."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(family), experts_implementation="eager")
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if ".experts." in name or "shared_experts" in name:
                tensor.normal_(std=tensor.shape[-1] ** -0.5).copy_(tensor.bfloat16())
            elif "tid2eid" in name:
                tensor.copy_(torch.rand(tensor.shape[0], E).argsort(1)[:, :K])
            elif "correction_bias" in name:
                tensor.normal_(std=0.05)
    return model.eval()


def with_bf16_experts(model: nn.Module) -> Any:
    """A copy whose routed experts are stored in bf16, the rest as it was: then only their precision differs."""
    copied: Any = copy.deepcopy(model)
    for name, parameter in copied.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            parameter.data = parameter.data.bfloat16()
    return copied


def tokens(batch: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(2, VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))


def train_step(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits and every gradient of one step, by name.

    Those of DeepSeek-V4's hyper-connections, a few numbers each in which large terms cancel, are one vector.
    """
    model.train()
    model.zero_grad()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    mixing = [name for name in grads if "hc" in name]
    if mixing:
        grads["hyper_connections"] = torch.cat([grads.pop(name).flatten() for name in mixing])
    return {"logits": out.logits.detach(), **grads}


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], least_db: float) -> None:
    """The same names, and every value within the gate.

    Gradients pass the rest of the model too: a factor of 1.2. Those of routers, in which large terms cancel: 2.
    """
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    misses = {}
    for name, value in want.items():
        db = sqnr_db(got[name].float(), value)
        if not db >= least_db - (6.0 if name.endswith(("gate.weight", "hyper_connections")) else 1.6):
            misses[name] = round(db, 1)
    assert not misses, misses
