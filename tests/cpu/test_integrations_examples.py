"""The examples of the integrations at small sizes, in this process."""

import json

import pytest
import torch

from examples import overlap_tuning, train_tiny

CPU = ["--device", "cpu", "--backend", "torch"]


def test_replaced_blocks_and_implementations_agree_with_transformers(capsys, tmp_path):
    pytest.importorskip("transformers", minversion="5")
    from examples import replace_deepseek_moe

    assert replace_deepseek_moe.main([*CPU, "--tokens", "24"]) == 0
    assert capsys.readouterr().out.count("pass") == 3
    model = replace_deepseek_moe.load(None, "cpu")
    model.save_pretrained(tmp_path)
    assert replace_deepseek_moe.main([*CPU, "--tokens", "12", "--model", str(tmp_path)]) == 0


def test_the_comparison_with_transformers_can_fail(capsys, monkeypatch):
    pytest.importorskip("transformers", minversion="5")
    from examples import replace_deepseek_moe

    original = replace_deepseek_moe.replace_moe

    def broken(model, **options):
        names = original(model, **options)
        model.get_submodule(names[0]).moe.experts.w2.data.view(torch.uint8)[0] = 0
        return names

    monkeypatch.setattr(replace_deepseek_moe, "replace_moe", broken)
    assert replace_deepseek_moe.main([*CPU, "--tokens", "24"]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_a_tiny_model_trains_in_fp8_as_in_bf16(capsys):
    assert train_tiny.main([*CPU, "--steps", "30", "--tokens", "128", "--hidden", "128"]) == 0
    assert "of the first loss apart: pass" in capsys.readouterr().out
    assert train_tiny.main([*CPU, "--steps", "2", "--tokens", "16", "--hidden", "128"]) == 1  # nothing is learnt in two
    assert "FAIL" in capsys.readouterr().out


def test_all_schedules_give_the_same_bits_and_a_trace(capsys, tmp_path):
    path = tmp_path / "overlap.json"
    assert overlap_tuning.main([*CPU, "--tokens", "24", "--repeats", "1", "--trace", str(path)]) == 0
    assert capsys.readouterr().out.count("the bits of inline") == 3
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert {"inline: backward", "stream: backward", "delayed: backward_dw"} <= names
