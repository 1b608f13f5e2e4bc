"""The examples that need a Hopper GPU, as far as a CPU can run them."""

import pytest
import torch

from examples import verify_fused


def test_the_three_way_check_with_the_emulation_in_the_fused_kernels_place(monkeypatch, capsys):
    monkeypatch.setattr(verify_fused, "PROBLEMS", verify_fused.PROBLEMS[2:4])
    assert verify_fused.main(["--device", "cpu", "--fused", "torch", "--unfused", "torch"]) == 0
    text = capsys.readouterr().out
    assert "2 of 2 problems pass every gate" in text and "bit for bit" in text
    assert "stage      oracle" in text and "emulation" not in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="the fused kernel may run here")
def test_without_a_hopper_gpu_it_says_why(capsys):
    assert verify_fused.main([]) == 2
    assert "backend: 'cute' does not run this: " in capsys.readouterr().err
