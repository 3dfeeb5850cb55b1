"""Plain tensors and buffer slices as ``out`` under fullgraph compilation with dynamic tokens."""

from __future__ import annotations

import pytest
import torch

import mlacast

BF16 = torch.bfloat16
KV = torch.linspace(-1, 1, 6 * 512).view(6, 512).to(BF16)


def attend(q: torch.Tensor, indices: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    mlacast.sparse_mla_prefill(q * 2, KV, indices, sm_scale=0.05, out=out)
    return out.float().sum(-1)


def test_plain_out_compiles_once_for_many_token_counts() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (4, 7, 0, 5):
        q = torch.linspace(0, 1, tokens * 3 * 512).view(tokens, 3, 512).to(BF16)
        indices = torch.arange(tokens * 2, dtype=torch.int32).view(tokens, 2) % 6
        ours, theirs = (torch.zeros(tokens, 3, 512, dtype=BF16) for _ in range(2))
        assert torch.equal(compiled(q, indices, ours), attend(q, indices, theirs))
        assert torch.equal(ours, theirs)


FORMATS = (
    mlacast.Mxfp8(),
    mlacast.Mxfp8("chunk32"),
    mlacast.Fp8Group(128, "float32", "mn_major"),
    mlacast.Fp8Group(64, "ue8m0_packed", "row_major"),
    mlacast.Nvfp4(50.0),
    mlacast.Fp8Tensor(0.5),
)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.key)
@pytest.mark.parametrize("total", [7, 10])
def test_a_slice_of_a_poisoned_buffer_is_filled_as_in_eager_mode(
    fmt: mlacast.OutFormat, total: int
) -> None:
    """Tokens 2..7 of ``total``: the padding behind them is zeroed only if they are the last."""

    def fill(q: torch.Tensor, buffer: mlacast.QuantizedTensor) -> torch.Tensor:
        indices = torch.zeros(q.shape[0], 2, dtype=torch.int32)
        _, _, lse = mlacast.sparse_mla_prefill(q, KV, indices, sm_scale=0.05, out=buffer[2:7])
        return lse

    torch._dynamo.reset()
    q = torch.ones(5, 2, 512, dtype=BF16)
    buffers = []
    for function in (fill, torch.compile(fill, fullgraph=True, backend="aot_eager")):
        buffer = mlacast.QuantizedTensor.empty(total, 2, 512, fmt)
        buffer.data.view(torch.uint8).fill_(0x5A)
        rows = buffer.sf_rows_with_padding()
        if rows is not None:
            (rows.view(torch.uint8) if fmt.key == "nvfp4" else rows).fill_(0x5A)
        function(q, buffer)
        buffers.append((buffer.data.view(torch.uint8), rows))
    assert torch.equal(buffers[0][0], buffers[1][0])
    eager, compiled = buffers[0][1], buffers[1][1]
    if eager is not None and compiled is not None:
        assert torch.equal(
            eager.contiguous().view(torch.uint8), compiled.contiguous().view(torch.uint8)
        )
        padding = eager[total:] if fmt.key != "nvfp4" else eager[:0]
        assert bool((padding == (0 if total == 7 else 0x5A)).all())
