"""A DeepSeek-V3 of transformers on this package's experts, in one line, and with its MoE blocks replaced.

    python examples/replace_deepseek_moe.py                  # a tiny random model
    python examples/replace_deepseek_moe.py --model FOLDER   # one of yours, in transformers' format

Prints how far the logits are from transformers' own and what a forward takes; the exit status is 1 if a gate fails.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from megamoe.gates import GATES, sqnr_db
from megamoe.integrations.transformers import register, replace_moe

TINY: dict[str, Any] = dict(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=512,
    moe_intermediate_size=128,
    num_hidden_layers=2,
    first_k_dense_replace=1,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    n_group=4,
    topk_group=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_rope_head_dim=16,
    qk_nope_head_dim=32,
    v_head_dim=32,
    initializer_range=1 / 16,
)


def load(folder: str | None, device: str) -> Any:
    """The user's model, or a tiny random one, on transformers' own experts in bf16."""
    import transformers

    options: dict[str, Any] = {"dtype": torch.bfloat16, "experts_implementation": "eager"}
    if folder is not None:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    else:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(transformers.DeepseekV3Config(**TINY), **options)
    return model.to(device).eval()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model in transformers' format")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--backend", default="auto", choices=("auto", "torch", "triton", "cute"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)

    eager = load(args.model, args.device)
    register(backend=args.backend)  # from here on "megamoe" and "megamoe_fp8" are experts implementations
    variants = {}
    for name in ("megamoe", "megamoe_fp8"):
        variants[name] = copy.deepcopy(eager)
        variants[name].set_experts_implementation(name)  # the one line
    variants["replaced, FP8 weights"] = copy.deepcopy(eager)
    blocks = replace_moe(variants["replaced, FP8 weights"], weights="fp8", backend=args.backend)
    print(f"{len(blocks)} MoE block(s) of {type(eager).__name__} on {args.device}")

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, eager.config.vocab_size, (1, args.tokens), generator=generator).to(args.device)
    want, took = run(eager, ids)
    print(f"  {'eager':24}{took:9.1f} ms")
    failed = False
    for name, model in variants.items():
        logits, took = run(model, ids)
        db = sqnr_db(logits.float(), want.float())
        # the rest of a bf16 model rounds too: neither path is nearer to the truth than some 35 dB
        least = 30.0 if name == "megamoe" else GATES["fp8"].tensor_db
        failed |= not db >= least
        print(f"  {name:24}{took:9.1f} ms   logits {db:5.1f} dB from eager   {'pass' if db >= least else 'FAIL'}")
        tokens = model.generate(ids, max_new_tokens=4, do_sample=False)[0, args.tokens :]
        print(f"  {'':24}it goes on with {tokens.tolist()}")
    return 1 if failed else 0


@torch.no_grad()
def run(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, float]:
    """(logits, milliseconds of a forward after a first one)."""
    model(ids)
    if ids.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    logits = model(ids).logits
    if ids.is_cuda:
        torch.cuda.synchronize()
    return logits, (time.perf_counter() - start) * 1e3


if __name__ == "__main__":
    sys.exit(main())
