"""Expert parallelism over processes: `torchrun --nproc-per-node 2 examples/expert_parallel.py`.

Each process holds its share of the experts and its own tokens (one of them none). All results are compared, bit for
bit, with one process that holds everything. On CPUs the group is gloo, on GPUs NCCL.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from megamoe import MegaMoE, MoEConfig

CONFIG = MoEConfig(hidden_size=256, intermediate_size=128, num_experts=8, top_k=2, num_shared_experts=1)


def share_of(whole: MegaMoE, group: dist.ProcessGroup) -> MegaMoE:
    """This rank's layer: its experts, and router and shared expert like everybody's."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    state = whole.state_dict()
    for name in ("experts.w13", "experts.w2"):
        state[name] = state[name].chunk(num_ranks)[rank]
    mine = MegaMoE(CONFIG, world=group, device=whole.experts.w13.device)
    mine.load_state_dict(state)
    return mine


def main() -> int:
    """Run on every rank; returns the exit status."""
    use_cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None

    torch.manual_seed(0)  # the same weights and tokens on every rank, of which each then takes its part
    whole = MegaMoE(CONFIG, device=device)
    tokens = [40 + 8 * r if r != 1 else 0 for r in range(dist.get_world_size())]
    x = torch.randn(sum(tokens), CONFIG.hidden_size, device=device).bfloat16()
    mine = share_of(whole, group)

    my_x = x.split(tokens)[rank].clone().requires_grad_()
    out = mine(my_x)
    out.square().mean().backward()  # also with no tokens: other ranks wait for this rank's part of the backward

    whole_x = x.clone().requires_grad_()
    want = whole(whole_x)
    sum(part.square().mean() for part in want.split(tokens) if part.numel()).backward()
    assert whole_x.grad is not None and my_x.grad is not None
    assert whole.experts.w13.grad is not None and mine.experts.w13.grad is not None
    pairs = {
        "out": (out, want.split(tokens)[rank]),
        "dx": (my_x.grad, whole_x.grad.split(tokens)[rank]),
        "dW13": (mine.experts.w13.grad, whole.experts.w13.grad.chunk(len(tokens))[rank]),
    }
    wrong = [name for name, (got, wanted) in pairs.items() if not torch.equal(got, wanted)]
    print(f"rank {rank}: T = {tokens[rank]}, {'equal bit for bit' if not wrong else f'DIFFERENT: {wrong}'}", flush=True)
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
