"""`megamoe verify`: green for the torch backend, red as soon as any stage is wrong, and what it prints."""

import dataclasses
import json
import math
import re
import types

import pytest
import torch

from megamoe import torch_steps
from megamoe.cli import build_parser, main
from megamoe.cli.problem import ROUTINGS, ProblemSpec, draw_topk_ids, make_problem
from megamoe.cli.stages import KINDS, emulate, judge, run_backend, run_oracle, run_steps
from megamoe.cli.verify import as_json, describe, specs_of, table
from megamoe.errors import MegaMoEValueError
from megamoe.quantize import quantize_weight
from megamoe.recipe import Recipe

SMALL = ["--hidden", "256", "--intermediate", "128", "--experts", "8", "--top-k", "2", "--tokens", "24"]
SPEC = ProblemSpec((24, 24), 256, 128, 8, 2)


@pytest.mark.parametrize(
    "options",
    [
        ["--routing", "all", "--ranks", "4"],
        ["--precision", "bf16"],
        ["--tokens", "17,0,31,1", "--hidden", "320", "--intermediate", "192"],
        ["--clamp", "1", "--seeds", "1,2"],
        ["--scale-format", "pow2"],
        ["--wgrad-operands", "bf16"],
        ["--tokens", "0"],
        ["--top-k", "8", "--ranks", "1"],
    ],
    ids=" ".join,
)
def test_the_torch_backend_passes(options, capsys):
    assert main(["verify", "--backend", "torch", "--device", "cpu", *SMALL, *options]) == 0
    text = capsys.readouterr().out
    assert "FAIL" not in text and "problems pass every gate" in text
    for stage in KINDS:
        assert f"\n{stage}  " in text, stage
    assert text.count("bit for bit") >= len(KINDS)


def test_json_holds_every_stage(capsys):
    assert main(["verify", "--json", "--routing", "masked,zipf", "--backend", "torch", *SMALL]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is True and len(report["problems"]) == 2
    assert report["recipe"] == dataclasses.asdict(Recipe())
    for problem in report["problems"]:
        assert problem["backend"] == "torch"
        assert [stage["stage"] for stage in problem["stages"]] == list(KINDS)
        assert all(stage["passed"] and stage["is_bitwise"] for stage in problem["stages"])
        assert all(20 < stage["sqnr_db"] < 60 for stage in problem["stages"])


def broken(step: str, change) -> types.SimpleNamespace:
    """The torch steps with the result of one of them changed."""
    steps = types.SimpleNamespace(**{name: getattr(torch_steps, name) for name in torch_steps.__all__})
    setattr(steps, step, lambda *args, **kwargs: change(getattr(torch_steps, step)(*args, **kwargs)))
    return steps


def zero_row(x: torch.Tensor) -> torch.Tensor:
    x[0] = 0.0
    return x


FAULTS = {
    "a NaN in out": ("combine", lambda x: x.index_fill(1, torch.tensor([3]), math.nan), "out"),
    "one lost row of y or gate_up": ("grouped_gemm", zero_row, "gate_up"),
    "gate and up swapped": ("grouped_gemm", lambda x: x.roll(x.shape[1] // 2, 1), "gate_up"),
    "dp of another slot": ("combine_weight_grads", lambda x: x.flip(1), "dp"),
    "dW of another expert": ("wgrad", lambda x: x.copy_(x.roll(1, 0)), "dW13"),
    "scales off by two": (
        "swiglu",
        lambda h: dataclasses.replace(h, scale=h.scale * 2),
        "h",
    ),
    "one lost gradient row": (
        "swiglu_backward",
        lambda g: dataclasses.replace(g, weighted_act=zero_row(g.weighted_act)),
        "p*act",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_turns_its_stage_red(fault):
    step, change, stage = FAULTS[fault]
    problem = make_problem(SPEC)
    emulated, oracle = emulate(problem, Recipe()), run_oracle(problem, None)
    verdicts = judge(run_steps(broken(step, change), problem, Recipe()), emulated, oracle, Recipe())
    red = [v.stage for v in verdicts if v.failures]
    assert stage in red and red[0] == stage, f"{fault}: {red}"
    assert "FAIL" in table(verdicts)


def test_a_red_stage_is_the_exit_status(monkeypatch, capsys):
    from megamoe.cli import stages

    steps = broken("combine", lambda out: out * 1.5)
    monkeypatch.setattr(
        stages, "run_backend", lambda name, problem, recipe: ("torch", run_steps(steps, problem, recipe))
    )
    assert main(["verify", *SMALL]) == 1
    text = capsys.readouterr().out
    assert "FAIL" in text and "0 of 1 problems pass every gate" in text
    assert main(["verify", "--json", *SMALL]) == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False


def test_masks_are_judged_by_the_backends_own_gate_and_up(monkeypatch):
    """A last bit of g or u at the limit flips its mask: red beside the emulation's g and u, green beside its own."""
    from megamoe.cli import stages

    problem, recipe, calls = make_problem(SPEC), Recipe(clamp=1.0), []

    def nudge(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        is_first_gemm = len(calls) <= problem.spec.num_ranks
        return (x.float() * (1 + 2**-8)).bfloat16() if is_first_gemm else x

    got = run_steps(broken("grouped_gemm", nudge), problem, recipe)
    plain = judge(got, emulate(problem, recipe), run_oracle(problem, 1.0), recipe)
    assert {"d_gate_up", "dX", "dx"} <= {v.stage for v in plain if v.failures}
    monkeypatch.setattr(stages, "run_backend", lambda *_: ("nudged", got))
    _, verdicts = stages.verify_problem(problem, recipe, "nudged")
    assert not [v for v in verdicts if v.failures and v.stage in stages.AFTER_MASKS]


MASK_FAULTS = {
    "no masks": lambda gate_up, recipe: (gate_up.clamp(-recipe.clamp, recipe.clamp), recipe),
    "a mask twice as wide": lambda gate_up, recipe: (gate_up, dataclasses.replace(recipe, clamp=2 * recipe.clamp)),
    "masks of up for gate": lambda gate_up, recipe: (gate_up.roll(gate_up.shape[1] // 2, 1), recipe),
}


@pytest.mark.parametrize("fault", MASK_FAULTS)
def test_masks_that_are_wrong_in_the_emulation_itself_are_red(fault, monkeypatch, capsys):
    """The torch backend is the emulation: only the oracle can tell that its gradients behind a clamp are wrong."""
    change, original = MASK_FAULTS[fault], torch_steps.swiglu_backward
    options = ["verify", "--backend", "torch", "--device", "cpu", *SMALL, "--clamp", "0.5"]
    assert main(options) == 0

    def wrong(dh, gate_up, weight, recipe, **options):
        return original(dh, *change(gate_up, recipe)[:1], weight, change(gate_up, recipe)[1], **options)

    monkeypatch.setattr(torch_steps, "swiglu_backward", wrong)
    capsys.readouterr()
    assert main(options) == 1
    red = {line.split()[0] for line in capsys.readouterr().out.splitlines() if "FAIL" in line}
    assert {"d_gate_up", "dX", "dx", "dW13"} <= red and not red & {"x", "gate_up", "h", "y", "out", "dh"}


def test_a_single_wrong_bit_is_seen_but_passes():
    """The emulation column says so; the gates are about accuracy."""
    problem = make_problem(SPEC)
    got = run_steps(broken("combine", lambda x: zero_bit(x)), problem, Recipe())
    verdicts = {v.stage: v for v in judge(got, emulate(problem, Recipe()), run_oracle(problem, None), Recipe())}
    assert not verdicts["out"].is_bitwise and not verdicts["out"].failures
    assert verdicts["dh"].is_bitwise


def zero_bit(x: torch.Tensor) -> torch.Tensor:
    if x.numel():
        x.view(torch.int16)[0, 0] ^= 1
    return x


def test_quantised_weights_are_taken_as_they_are():
    problem = make_problem(SPEC)
    given = quantize_weight(problem.w13_E2IH, Recipe(), 2), quantize_weight(problem.w2_EHI, Recipe())
    loaded = dataclasses.replace(problem, quantized=given)
    for stage, value in run_backend("torch", loaded, Recipe())[1].items():
        assert torch.equal(value.tensor, run_backend("torch", problem, Recipe())[1][stage].tensor), stage


def test_figures_without_a_value_become_null():
    problem = make_problem(dataclasses.replace(SPEC, num_tokens=(0, 0)))
    verdicts = judge(emulate(problem, Recipe()), emulate(problem, Recipe()), run_oracle(problem, None), Recipe())
    assert all(json.loads(json.dumps(as_json(v)))["sqnr_db"] is None for v in verdicts)


@pytest.mark.parametrize(
    "options,message",
    [
        (["--tokens", "a"], "^megamoe verify: --tokens: expected integers separated by commas, got 'a'"),
        (["--seeds", ""], "--seeds: expected integers separated by commas, got ''"),
        (["--tokens", "1,2", "--ranks", "3"], "--tokens: expected one T, or one for each of the 3 ranks, got 1,2"),
        (["--ranks", "0"], "^megamoe verify: --ranks: expected at least 1, got 0"),
        (["--experts", "5"], "verify: --experts: expected a positive multiple of the 2 ranks, got 5"),
        (["--routing", "nope"], "verify: --routing: expected one of uniform, .*, got 'nope'"),
        (["--tokens", "-1"], r"verify: --tokens: expected T >= 0 for each rank, got \(-1, -1\)"),
        (["--hidden", "0"], "verify: --hidden: expected at least 1, got 0"),
        (["--top-k", "-2", "--intermediate", "0"], r"--intermediate: .* got 0\.\n--top-k: expected at least 1, got -2"),
        (["--clamp", "-1"], "verify: --clamp: expected a positive finite limit or None, got -1.0"),
        (["--precision", "bf16", "--wgrad-operands", "fp8"], "--wgrad-operands: expected 'bf16' where precision is"),
        (["--seeds", "-1"], "--seeds: expected 0 to 9223372036854775807, got -1"),
        (["--transport", "nccl"], "--transport: expected not to be given without torchrun, got nccl"),
        (["--shape", "A", "--ranks", "3"], "--ranks: expected a divisor of 8192 tokens and 32 experts, got 3"),
        (["--device", "cpu", "--backend", "cute"], "backend: 'cute' does not run this: "),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_refusals(options, message, capsys):
    assert main(["verify", *options]) == (1 if "cute" in options else 2)
    assert re.search(message, capsys.readouterr().err)


def test_the_shapes_of_the_benchmarks():
    options = build_parser("verify").parse_args(["--shape", "A", "--ranks", "4", "--routing", "uniform,zipf"])
    specs = list(specs_of(options))
    assert [s.routing for s in specs] == ["uniform", "zipf"]
    assert {(s.num_experts, s.hidden, s.intermediate, s.top_k, s.num_tokens) for s in specs} == {
        (32, 7168, 2048, 8, (2048,) * 4)
    }
    assert next(specs_of(build_parser("verify").parse_args(["--shape", "C"]))).num_tokens == (32768,)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routings_are_what_they_say(routing):
    spec = ProblemSpec((40, 24), num_experts=16, top_k=4, routing=routing)
    ids = draw_topk_ids(spec, torch.Generator().manual_seed(0))
    used = set(ids.flatten().tolist())
    assert ids.shape == (64, 4) and used <= set(range(-1, 16))
    is_distinct = all(len(set(row)) == 4 for row in ids.tolist())
    if routing in ("uniform", "balanced", "zipf", "first_rank"):
        assert is_distinct and -1 not in used
    expected = {
        "uniform": 15 not in used,
        "balanced": torch.bincount(ids.flatten().clamp_min(0)).tolist() == [16] * 16,
        "zipf": not used & {14, 15},
        "one_expert": used == {0},
        "first_rank": used <= set(range(8)),
        "masked": -1 in used and bool((ids[::5] == -1).all()),
        "duplicates": not is_distinct,
    }
    assert expected[routing]


def test_a_problem_is_the_same_on_any_number_of_ranks():
    one, four = (make_problem(ProblemSpec(t)) for t in ((48,), (10, 0, 30, 8)))
    assert torch.equal(one.xs[0], torch.cat(four.xs)) and torch.equal(one.topk_ids[0], torch.cat(four.topk_ids))
    with pytest.raises(MegaMoEValueError, match="num_tokens: expected T >= 0 for each rank"):
        ProblemSpec(())


@pytest.mark.parametrize("text", ["bogus", "meta", "cuda:99"])
def test_refuses_devices_that_are_not_here(text, capsys):
    assert main(["verify", "--device", text]) == 2
    assert re.match(r"megamoe verify: --device: expected cpu.*, got '" + text + "'", capsys.readouterr().err)


def test_says_what_judges_gradients_behind_a_clamp():
    text = "fp8, fp32 scales, fp8 operands of weight gradients, clamp 0.5"
    assert describe(Recipe(clamp=0.5)) == f"{text} (masks of the gradients by the backend's own gate and up)"
    assert "masks" not in describe(Recipe())
