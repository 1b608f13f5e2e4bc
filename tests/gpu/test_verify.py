"""`megamoe verify` and the demo on a CUDA device: green there for every backend that runs, red with a wrong expert."""

import pytest
import torch

from examples import demo, verify_fused
from megamoe.backends import Problem, why_not
from megamoe.cli import main
from megamoe.recipe import Recipe


def need(backend: str, precision: str) -> None:
    """Skip where the backend says that it does not run."""
    reason = why_not(
        backend, Problem.of(torch.device("cuda"), Recipe(precision), hidden_size=512, intermediate_size=256)
    )
    if reason is not None:
        pytest.skip(f"{backend}: {reason}")


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize("backend", ["torch", "triton", "cute"])
def test_every_routing_passes(backend, precision, capsys):
    need(backend, precision)
    assert main(["verify", "--backend", backend, "--precision", precision, "--routing", "all"]) == 0, (
        capsys.readouterr()
    )


@pytest.mark.parametrize("backend", ["triton", "cute"])
def test_unequal_ranks_pass(backend, capsys):
    need(backend, "fp8")
    assert main(["verify", "--backend", backend, "--tokens", "17,0,196,1"]) == 0, capsys.readouterr()


def test_the_three_way_check_passes(capsys):
    need("cute", "fp8")
    assert verify_fused.main([]) == 0, capsys.readouterr()


def test_the_demo_uses_the_gpu(capsys):
    pytest.importorskip("transformers")
    status, text = demo.main([]), capsys.readouterr().out
    assert status == 0 and "on cuda" in text, text


def test_the_demo_turns_red(capsys):
    pytest.importorskip("transformers")
    assert demo.main(["--break-expert", "5"]) == 1
