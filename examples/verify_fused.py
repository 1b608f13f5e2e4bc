"""Three-way check of the fused kernel on a Hopper GPU: fused, Triton steps and the fp64 oracle on the same inputs.

Copy it to see how the parts are called, or run it: `python examples/verify_fused.py`. The exit status is 0 if every
stage that the fused kernel stores passes, 1 if one misses a gate, 2 if the fused kernel does not run here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from megamoe import Recipe
from megamoe.cli.problem import ProblemSpec, make_problem
from megamoe.cli.stages import judge, run_backend, run_oracle
from megamoe.cli.verify import Progress, table
from megamoe.errors import BackendUnavailable
from megamoe.gates import GATES

PROBLEMS = (
    ProblemSpec((256,), 512, 256, 16, 4, "uniform"),
    ProblemSpec((300,), 1024, 384, 24, 8, "zipf"),
    ProblemSpec((129, 0), 512, 256, 16, 4, "duplicates"),
    ProblemSpec((64, 1, 0, 200), 512, 256, 16, 4, "masked"),
    ProblemSpec((96, 96), 512, 256, 16, 2, "first_rank"),
    ProblemSpec((160,), 512, 256, 16, 1, "one_expert"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fused", default="cute", help="the backend under test")
    parser.add_argument("--unfused", default="triton", help="the backend beside it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    recipe = Recipe()
    num_failed = 0
    for number, spec in enumerate(PROBLEMS, 1):
        progress = Progress(f"[{number}/{len(PROBLEMS)}] {spec}")
        problem = make_problem(spec, args.device)
        try:
            progress(args.fused)
            _, fused = run_backend(args.fused, problem, recipe)
            progress(args.unfused)
            _, unfused = run_backend(args.unfused, problem, recipe)
        except BackendUnavailable as reason:
            print(reason, file=sys.stderr)
            return 2
        progress("oracle")
        oracle = run_oracle(problem, recipe.clamp)
        verdicts = judge(fused, unfused, oracle, recipe, GATES[recipe.precision].backends_db)
        progress.clear()
        failed = any(v.failures for v in verdicts)
        num_failed += failed
        print(f"{spec}: {'FAIL' if failed else 'pass'}\n{table(verdicts, beside=args.unfused)}\n", flush=True)
    print(f"{len(PROBLEMS) - num_failed} of {len(PROBLEMS)} problems pass every gate")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
