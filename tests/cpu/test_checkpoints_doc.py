"""The Python blocks of docs/checkpoints.md run as they stand, on a small model in place of the folder names."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from checkpoints import load_moe_layer
from checkpoints.names import FAMILIES
from tests.support.source_tree import ROOT, fenced_blocks
from tests.support.toy_checkpoint import Toy, per_expert, same_bytes, write_shards

TEXT = (ROOT / "docs" / "checkpoints.md").read_text()
CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": 256,
    "moe_intermediate_size": 192,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}


def test_the_blocks_run_and_do_what_they_say(tmp_path: Path) -> None:
    for name, scale in (("folder", "F32"), ("bf16_folder", None)):
        write_shards(tmp_path / name, per_expert(Toy(layer=1, scale=scale)))
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIG))
    names = ("folder", "bf16_folder", "fp8_folder", "target", "trained")
    scope: dict = {name: tmp_path / name for name in names}
    blocks = fenced_blocks(TEXT, ("python",))
    assert len(blocks) == 5
    exec("\n".join(blocks), scope)
    assert scope["layer"].experts.w13.dtype == torch.float8_e4m3fn and scope["masters"].experts.w13.requires_grad
    saved, read = load_moe_layer(tmp_path / "target", 1), load_moe_layer(tmp_path / "folder", 1)
    assert same_bytes(saved.w13_E2IH, read.w13_E2IH)
    assert load_moe_layer(tmp_path / "fp8_folder", 1).w13_scale is not None


def test_every_family_is_in_the_table() -> None:
    assert all(f"`{family}`" in TEXT for family in FAMILIES)
