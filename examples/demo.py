"""`make demo`: one MoE layer of an FP8 DeepSeek-V3 checkpoint, forward and backward, beside oracle and transformers.

transformers makes a small model and saves it in bf16, `checkpoints.convert_to_fp8` writes the FP8 shards, `MegaMoE`
loads one layer of them on two virtual ranks. Every stage is compared with the fp64 oracle; the results also with
transformers' own `DeepseekV3MoE` in fp64, whose weights are read from the same files without any code of ours.
The exit status is 1 if a gate fails.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from checkpoints import CheckpointError, convert_to_fp8
from megamoe import LocalWorld, MegaMoE, Recipe
from megamoe.cli.problem import Problem, ProblemSpec
from megamoe.cli.stages import run_oracle, verify_problem
from megamoe.cli.verify import HEADER as STAGE_HEADER
from megamoe.cli.verify import Progress, cells, decibels, device_of
from megamoe.errors import MegaMoEError, MegaMoEValueError, expected
from megamoe.gates import GATES, sqnr_db, worst_row
from megamoe.layer import WeightFormat
from megamoe.quantize import QuantizedWeight, quantize_matrix

LAYER = 1
NUM_GROUPS = 4
GATE = GATES["fp8"]
ROUNDING_DB = 200.0
"""Least agreement of two fp64 computations."""
ROUTER_DB = 100.0
"""Least agreement of two fp32 routers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the demo."""
    parser.add_argument("--tokens", type=int, default=96, help="T of the first rank; the second has half as many")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=256)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="where the checkpoints go (default: a temporary folder)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="auto", choices=("auto", "torch", "triton", "cute"))
    parser.add_argument(
        "--break-expert", type=int, metavar="E", help="swap gate and up of one loaded expert: must fail"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        import transformers  # noqa: F401
    except ImportError:
        print("transformers: expected an installed package, got none. pip install 'megamoe[test]'", file=sys.stderr)
        return 2
    try:
        check_options(args)
        with contextlib.ExitStack() as stack:
            folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            return run(args, folder)
    except (MegaMoEError, CheckpointError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


def check_options(args: argparse.Namespace) -> None:
    """Refuse sizes of which there is no such model, and devices that are not here."""
    sizes = ("tokens", "hidden", "intermediate")
    problems = [expected(f"--{n}", "at least 1", getattr(args, n)) for n in sizes if getattr(args, n) < 1]
    if args.experts < 1 or args.experts % NUM_GROUPS:
        problems.append(expected("--experts", f"a multiple of the {NUM_GROUPS} groups", args.experts))
    elif not 1 <= args.top_k <= args.experts // 2:
        problems.append(expected("--top-k", f"1 to the {args.experts // 2} experts of two groups", args.top_k))
    if args.break_expert is not None and not 0 <= args.break_expert < args.experts:
        problems.append(expected("--break-expert", f"an expert below {args.experts}", args.break_expert))
    if problems:
        raise MegaMoEValueError("\n".join(problems))
    device_of(args.device)


def run(args: argparse.Namespace, folder: Path) -> int:
    """Write, load, run, compare, print."""
    progress = Progress("demo")
    progress("transformers writes a model")
    write_checkpoint(args, folder / "bf16")
    keys = convert_to_fp8(folder / "bf16", folder / "fp8", quantize_matrix)
    shards = sorted((folder / "fp8").glob("*.safetensors"))
    progress("loading")
    world, device = LocalWorld(2), torch.device(args.device)
    tokens = (args.tokens, args.tokens // 2)

    def load(weights: WeightFormat) -> MegaMoE:
        layer = MegaMoE.from_checkpoint(
            folder / "fp8", LAYER, world=world, device=device, backend=args.backend, weights=weights
        )
        return break_expert(layer, args.break_expert)

    block = transformers_block(folder / "fp8", LAYER).to(device)
    torch.manual_seed(1)
    xs = [torch.randn(t, args.hidden, device=device).bfloat16() for t in tokens]
    douts = [torch.randn(t, args.hidden, device=device).bfloat16() for t in tokens]

    frozen, trained = load("fp8"), load("fp32")
    problem = routed_problem(frozen, block, xs, douts)
    progress.clear()
    print(f"{len(keys)} matrices in FP8 in {len(shards)} shards; layer {LAYER} on R = 2 virtual ranks, T = {tokens}")
    print(f"H = {args.hidden}, I = {args.intermediate}, E = {args.experts}, K = {args.top_k}, ", end="")
    backend, verdicts = verify_problem(problem, Recipe(), args.backend, progress)
    progress.clear()
    print(f"backend {backend} on {device.type}\n")
    print_table("routed experts, stage by stage, against the fp64 oracle", STAGE_HEADER, [cells(v) for v in verdicts])

    checks = [
        *oracle_checks(problem, block),
        *layer_checks(frozen, trained, block, xs, douts),
    ]
    print_table("against transformers' DeepseekV3MoE in fp64", ("result", "transformers", "worst row", "gates"), checks)
    failed = sum(bool(v.failures) for v in verdicts) + sum(line[-1] != "pass" for line in checks)
    print("every gate passes" if not failed else f"{failed} lines FAIL their gate")
    return 1 if failed else 0


# ---------------------------------------------------------------- the checkpoint


def write_checkpoint(args: argparse.Namespace, folder: Path) -> None:
    """A DeepSeek-V3 of two layers (one dense, one MoE) with random weights, saved by transformers in bf16 shards."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=64,
        hidden_size=args.hidden,
        intermediate_size=2 * args.intermediate,
        moe_intermediate_size=args.intermediate,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        n_routed_experts=args.experts,
        n_shared_experts=1,
        num_experts_per_tok=args.top_k,
        n_group=NUM_GROUPS,
        topk_group=2,
        routed_scaling_factor=2.5,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        max_position_embeddings=64,
        initializer_range=args.hidden**-0.5,
    )
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(config)
    model.model.layers[LAYER].mlp.gate.e_score_correction_bias.normal_(std=0.1)
    with contextlib.redirect_stderr(io.StringIO()):
        model.bfloat16().save_pretrained(folder, max_shard_size="2MB")


def transformers_block(folder: Path, layer: int) -> Any:
    """transformers' MoE block in fp64, dequantised from the shards by safetensors and three lines of arithmetic."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    tensors: dict[str, torch.Tensor] = {}
    for shard in folder.glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            prefix = f"model.layers.{layer}.mlp."
            tensors.update({k.removeprefix(prefix): file.get_tensor(k) for k in file.keys() if k.startswith(prefix)})

    def matrix(name: str) -> torch.Tensor:
        weight, scale = tensors[f"{name}.weight"].double(), tensors[f"{name}.weight_scale_inv"].double()
        blocks = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return weight * blocks[: weight.shape[0], : weight.shape[1]]

    config = DeepseekV3Config.from_pretrained(folder)
    config._experts_implementation = "eager"
    block = DeepseekV3MoE(config).double()
    experts = range(config.n_routed_experts)
    with torch.no_grad():
        block.gate.weight.copy_(tensors["gate.weight"])
        block.gate.e_score_correction_bias.copy_(tensors["gate.e_score_correction_bias"])
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(block.shared_experts, name).weight.copy_(matrix(f"shared_experts.{name}"))
        for e in experts:
            gate, up = (matrix(f"experts.{e}.{name}") for name in ("gate_proj", "up_proj"))
            block.experts.gate_up_proj[e] = torch.cat([gate, up])
            block.experts.down_proj[e] = matrix(f"experts.{e}.down_proj")
    return block


def break_expert(layer: MegaMoE, expert: int | None) -> MegaMoE:
    """Swap gate and up of one expert, a fault that loaders elsewhere have had; None: the layer as it is."""
    if expert is None:
        return layer
    for parameter in (layer.experts.w13, layer.experts.w13_scale):
        if parameter is not None:
            data = parameter.data.view(torch.uint8) if parameter.element_size() == 1 else parameter.data
            data[expert] = data[expert].roll(data.shape[1] // 2, 0)
    layer.refresh_weights()
    return layer


# ---------------------------------------------------------------- comparisons


def routed_problem(layer: MegaMoE, block: Any, xs: list[torch.Tensor], douts: list[torch.Tensor]) -> Problem:
    """The routed experts' part: the layer's own routing and FP8 bytes; the oracle's weights come from the block."""
    ids, weights = zip(*(layer.router(x) for x in xs), strict=True)
    config = layer.config
    spec = ProblemSpec(
        tuple(x.shape[0] for x in xs), config.hidden_size, config.intermediate_size, config.num_experts, config.top_k
    )
    w13 = QuantizedWeight(layer.experts.w13.data, layer.experts.w13_scale, row_groups=2)
    w2 = QuantizedWeight(layer.experts.w2.data, layer.experts.w2_scale)
    return Problem(
        spec,
        xs,
        list(ids),
        [w.detach() for w in weights],
        douts,
        block.experts.gate_up_proj.detach(),
        block.experts.down_proj.detach(),
        quantized=(w13, w2),
    )


Line = tuple[str, str, str, str]


def compare(
    name: str, got: torch.Tensor | None, want: torch.Tensor | None, least_db: float, worst: float | None = None
) -> Line:
    """One line of the table: a result, its SQNR, its worst row, whether it passes."""
    assert got is not None and want is not None, f"{name} is missing"
    db = sqnr_db(got, want)
    ratio, row = worst_row(got.flatten(1), want.flatten(1))
    passes = db >= least_db and (worst is None or ratio <= worst)
    return name, decibels(db), f"{ratio:.4f} at {row}", "pass" if passes else f"FAIL < {least_db:g} dB"


def oracle_checks(problem: Problem, block: Any) -> list[Line]:
    """Our oracle against transformers' experts: both in fp64 on the same ids and weights, so they agree to rounding."""
    one, oracle = problem.on_one_rank(), run_oracle(problem, None).values
    x, p = one.xs[0].double().requires_grad_(), one.topk_weights[0].double().requires_grad_()
    block.zero_grad()
    out = block.experts(x, one.topk_ids[0], p)
    out.backward(one.douts[0].double())
    found = {"out": out.detach(), "dx": x.grad, "dp": p.grad}
    found |= {"dW13": block.experts.gate_up_proj.grad, "dW2": block.experts.down_proj.grad}
    return [compare(f"oracle's {name}", oracle[name], value, ROUNDING_DB) for name, value in found.items()]


def layer_checks(
    frozen: MegaMoE, trained: MegaMoE, block: Any, xs: list[torch.Tensor], douts: list[torch.Tensor]
) -> list[Line]:
    """The whole layer, with router and shared expert, against the whole block: out and every gradient."""
    x = torch.cat(xs).double().requires_grad_()
    block.zero_grad()
    want = block(x)
    want.backward(torch.cat(douts).double())
    leaves = [v.clone().requires_grad_() for v in xs]
    outs = trained(leaves)
    torch.autograd.backward(outs, douts)
    with torch.no_grad():
        inference = frozen(xs)
        _, weights, ids = block.gate(x)
        our_ids, our_weights = frozen.router(torch.cat(xs))
    (ids, order), (our_ids, our_order) = ids.sort(1), our_ids.sort(1)
    experts, shared, mlp = trained.experts, trained.shared, block.shared_experts
    assert shared is not None
    shared_w13 = torch.cat([mlp.gate_proj.weight.grad, mlp.up_proj.weight.grad])
    return [
        compare("expert ids", our_ids, ids, float("inf")),
        compare("expert weights", our_weights.gather(1, our_order), weights.gather(1, order), ROUTER_DB),
        compare("out, FP8 weights", torch.cat(inference), want.detach(), GATE.tensor_db, GATE.row),
        compare("out", torch.cat(outs).detach(), want.detach(), GATE.tensor_db, GATE.row),
        compare("dx", torch.cat([v.grad for v in leaves if v.grad is not None]), x.grad, GATE.tensor_db, GATE.row),
        compare("d router", trained.router.weight.grad, block.gate.weight.grad, GATE.tensor_db),
        compare("dW13", experts.w13.grad, block.experts.gate_up_proj.grad, GATE.tensor_db),
        compare("dW2", experts.w2.grad, block.experts.down_proj.grad, GATE.tensor_db),
        compare("dW13 shared", shared.w13.grad, shared_w13[None], GATE.tensor_db),
        compare("dW2 shared", shared.w2.grad, mlp.down_proj.weight.grad[None], GATE.tensor_db),
    ]


def print_table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Aligned text."""
    rows = [header, *lines]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    print(title)
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print()


if __name__ == "__main__":
    sys.exit(main())
