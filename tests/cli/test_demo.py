"""``mlacast demo``: its figures, its picture, its output, and that it can fail."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

pytest.importorskip("transformers", reason="transformers is not installed")

import mlacast
from mlacast.cli import demo, demo_mixed
from mlacast.cli.demo_metrics import stored_bytes
from mlacast.cli.demo_mixed import DECODE, PADDING, PREFILL, MixedRun, fill_pool, run_mixed_step
from mlacast.cli.demo_model import build_model, passage_tokens
from mlacast.integrations.transformers import forward
from mlacast.integrations.transformers.attend import attend
from mlacast.integrations.transformers.inputs import AttentionInputs

# Enough to leave the window of 16 and to complete entries of both compressors.
PROMPT, STEPS = 30, 3


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PROMPT_TOKENS", PROMPT)
    monkeypatch.setattr(demo, "DECODE_TOKENS", STEPS)


def run_json(capsys: pytest.CaptureFixture[str], out: Path, seed: int = 0) -> dict[str, Any]:
    assert demo.run_demo(json=True, out=out, device="cpu", seed=seed) == 0
    captured = capsys.readouterr()
    report: dict[str, Any] = json.loads(captured.out)
    return report


def without_times(report: dict[str, Any]) -> dict[str, Any]:
    stages = [
        {key: value for key, value in stage.items() if not key.startswith("seconds")}
        for stage in report["stages"]
    ]
    return {**report, "stages": stages, "picture": None}


def test_json_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = run_json(capsys, tmp_path / "new" / "folder")
    assert report["agrees"] is True
    assert (report["device"], report["backend"]) == ("cpu", "reference")
    prefill, decode, mixed = report["stages"]
    assert [stage["name"] for stage in report["stages"]] == ["prefill", "decode", "mixed step"]
    assert [stage["tokens"] for stage in report["stages"]] == [PROMPT, STEPS, 42]

    # Five layers; 8 heads of 512 values: 8192 bytes per token and layer in bf16, 4096 codes and one
    # scale byte for 32 of them in FP8.
    for stage, rows in ((prefill, 5 * PROMPT), (decode, 5 * STEPS), (mixed, 42)):
        assert stage["bytes_bf16"] == rows * 8192
        assert stage["bytes_fp8"] == rows * (4096 + 128)
        assert stage["bytes_saved"] == pytest.approx(1 - 4224 / 8192)
    assert [stage["launches_fused"] for stage in report["stages"]] == [5, 5 * STEPS, 2]
    assert [stage["launches_separate"] for stage in report["stages"]] == [15, 15 * STEPS, 6]

    # Rounding to bfloat16 is off by 2**-8 of a number at most, e4m3 by 2**-4; the cosine of what is
    # off by e is 1 - e**2 / 2, in five layers no more than five times that.
    for stage in (prefill, decode):
        assert 0.99 < stage["logit_cosine"] < 1
        assert 0 < stage["out_error_bf16"] < 2.0**-7 < stage["out_error"] < 2.0**-4
    assert mixed["logit_cosine"] is None
    assert 0.99 < mixed["out_cosine"] < 1
    assert len(report["layers"]) == 5
    assert len(report["decode_logit_errors"]) == STEPS
    assert len(report["mixed_row_errors"]) == 42
    assert any("reference implementation" in note for note in report["notes"])

    picture = Path(report["picture"])
    assert picture.parent == tmp_path / "new" / "folder"
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(data[start : start + 4], "big") for start in (16, 20))
    assert width > height > 900


def test_same_seed_same_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    first = run_json(capsys, tmp_path, seed=5)
    torch.manual_seed(99)
    assert without_times(run_json(capsys, tmp_path, seed=5)) == without_times(first)
    assert without_times(run_json(capsys, tmp_path, seed=6)) != without_times(first)
    torch.set_rng_state(state)
    assert torch.get_num_threads() == threads


def test_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert demo.run_demo(json=False, out=tmp_path, device=None, seed=0) == 0
    text = capsys.readouterr().out
    for expected in ("prefill", "decode", "mixed step", "bytes saved", "48.4%", "launches, fused"):
        assert expected in text
    assert "mlacast and transformers agree" in text
    assert (tmp_path / demo.PICTURE).exists()


def test_disagreement_is_an_exit_code(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend_without_sinks(step: AttentionInputs, *args: Any, **kwargs: Any) -> None:
        no_sink = torch.full_like(step.attn_sink, -torch.inf)
        attend(dataclasses.replace(step, attn_sink=no_sink), *args, **kwargs)

    monkeypatch.setattr(forward, "attend", attend_without_sinks)
    assert demo.run_demo(json=False, out=tmp_path, device="cpu", seed=0) == 1
    assert "DISAGREE" in capsys.readouterr().out


def test_bad_device_and_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="device must .* got 'cpux'"):
        demo.run_demo(json=True, out=tmp_path, device="cpux", seed=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(typer.BadParameter, match="out '.*file'"):
        demo.run_demo(json=True, out=tmp_path / "file", device="cpu", seed=0)


def test_old_transformers_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    monkeypatch.setattr(transformers, "__version__", "5.1.0")
    assert demo.run_demo(json=True, out=tmp_path, device="cpu", seed=0) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "needs transformers>=5.24" in captured.err


@cache
def mixed_run() -> MixedRun:
    return run_mixed_step(build_model(3), demo.MIXED_LAYER, seed=3)


def test_mixed_step_rows_have_one_writer_each() -> None:
    run = mixed_run()
    # 3 decode rows, 39 prefill rows; 4096 codes are 128 blocks of 32.
    expected = torch.full((42, 128), PREFILL)
    expected[:3] = DECODE
    assert torch.equal(run.data_writers, expected)
    # 2 groups of 2048 / 128 words; 42 tokens are padded to 44.
    expected = torch.full((32, 44), PREFILL)
    expected[:, :3] = DECODE
    expected[:, 42:] = PADDING
    assert torch.equal(run.sf_writers, expected)


def test_mixed_step_rows_agree_with_eager_one_by_one() -> None:
    run = mixed_run()
    # One FP8 rounding of the output, at most 2**-5 in the root mean square; decode rows read keys
    # and values with a second one. Twice that for single rows, which are no averages.
    assert max(run.row_errors) < 2 * 2 * 2.0**-5
    assert run.stage.agrees


def test_pool_addresses_every_latent() -> None:
    lengths = [13, 0, 8, 1]
    latents = [torch.randn(n, 512).to(torch.bfloat16) for n in lengths]
    columns = [
        torch.tensor([0, 12, -1, 7], dtype=torch.int32),
        torch.zeros(0, dtype=torch.int32),
        torch.tensor([7, 0], dtype=torch.int32),
        torch.tensor([-1, 0, 0], dtype=torch.int32),
    ]
    pool = fill_pool(latents, columns, seed=1)
    # 2, 0, 1 and 1 pages of 8.
    assert pool.cache.shape[:2] == (4, demo_mixed.PAGE_SIZE)
    assert pool.indices.shape == (4, 4)
    for request, row in enumerate(columns):
        for place in range(4):
            slot = int(pool.indices[request, place])
            column = int(row[place]) if place < len(row) else -1
            if column < 0:
                assert slot == -1
                continue
            found = mlacast.kv_cache_gather(pool.cache, torch.tensor([slot]), mlacast.KvFormat.V4)
            # e4m3 with a power-of-two scale per 64 values: half a step of 1/8, and what is below
            # the smallest normal code.
            error = (found[0].float() - latents[request][column].float()).abs()
            assert (error <= latents[request][column].float().abs() * 2.0**-4 + 2.0**-9).all()


def test_stored_bytes_by_hand() -> None:
    assert stored_bytes(10, 2, 1024, mlacast.Bf16()) == 10 * 2 * 1024 * 2
    assert stored_bytes(10, 2, 1024, mlacast.Mxfp8()) == 10 * 2 * (1024 + 32)


def test_passage_repeats_and_is_bytes() -> None:
    long = passage_tokens(2000)
    assert long.shape == (1, 2000)
    assert 0 <= int(long.min()) <= int(long.max()) < 128
    assert torch.equal(long[:, :50], passage_tokens(50))


def test_model_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    one, other = (build_model(4, layer_types=["sliding_attention"]) for _ in range(2))
    assert torch.equal(torch.rand(3), expected)
    sinks = one.model.layers[0].self_attn.sinks.detach()
    assert torch.equal(sinks, other.model.layers[0].self_attn.sinks)
    assert float(sinks.abs().min()) > 0
