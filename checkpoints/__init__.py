"""MoE layers in and out of safetensors checkpoints. Imports torch and safetensors only.

`load_moe_layer` reads one layer and returns plain tensors, `save_moe_layer` and `write_index` write them back byte for
byte, under the same names or another family's. `convert_to_fp8` writes FP8 shards from a bf16 checkpoint.
"""

from checkpoints.convert import convert_to_fp8, is_expert_weight
from checkpoints.errors import CheckpointError
from checkpoints.layouts import ExpertGroup, MoELayerTensors
from checkpoints.load import load_moe_layer
from checkpoints.names import FAMILIES
from checkpoints.save import save_moe_layer, write_index

__all__ = [
    "FAMILIES",
    "CheckpointError",
    "ExpertGroup",
    "MoELayerTensors",
    "convert_to_fp8",
    "is_expert_weight",
    "load_moe_layer",
    "save_moe_layer",
    "write_index",
]
