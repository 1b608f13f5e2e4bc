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


def test_a_tiny_model_trains_in_fp8_as_in_bf16(capsys, tmp_path):
    out = tmp_path / "records" / "tiny"
    assert train_tiny.main(["--device", "cpu", "--steps", "24", "--batch", "1", "--lr", "3e-3", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert text.endswith(("tiny.json\n", "tiny.png\n")) and "\npass\n" in text and "FP8 emulation to bf16" in text
    record = json.loads(out.with_suffix(".json").read_text())
    assert record["passes"] and record["gpu"] == "cpu" and len(record["losses"]["bf16"][0]) == 24
    assert train_tiny.main(["--device", "cpu", "--steps", "2", "--batch", "1"]) == 1  # nothing is learnt in two
    assert "FAIL" in capsys.readouterr().out


def test_what_decides_whether_the_fused_kernels_train():
    """Losses of two seeds 0.1 apart; the fused ones may be that far from the Triton path's, and no further."""
    steps = 30

    def curve(end: float) -> list[float]:
        return [5.0] * (steps - 10) + [end] * 10

    def judge(fused: float, bf16: float = 1.5) -> dict:
        seeds = (0.0, 0.1)
        runs = {"bf16": bf16, "Triton FP8": 1.5, "fused FP8": fused}
        return train_tiny.judge({name: [curve(end + s) for s in seeds] for name, end in runs.items()}, steps)

    near = judge(1.59)
    assert (
        near["passes"]
        and near["between_seeds"] == pytest.approx(0.1)
        and near["fused_to_triton"] == pytest.approx(0.09)
    )
    assert not judge(1.61)["passes"] and not judge(1.39)["passes"]
    assert not judge(1.5, bf16=1.9)["passes"]  # FP8 that learns better than bf16 is as strange
    assert judge(1.5, bf16=1.505)["fp8_to_bf16"]["fused FP8"] == pytest.approx(-0.005)


def test_all_schedules_give_the_same_bits_and_a_trace(capsys, tmp_path):
    path = tmp_path / "overlap.json"
    assert overlap_tuning.main([*CPU, "--tokens", "24", "--repeats", "1", "--trace", str(path)]) == 0
    assert capsys.readouterr().out.count("the bits of inline") == 3
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert {"inline: backward", "stream: backward", "delayed: backward_dw"} <= names
