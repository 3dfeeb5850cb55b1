"""The operations compute forward only: no result carries a part of an autograd graph."""

from __future__ import annotations

import warnings

import torch

import mlacast
from mlacast.compat.flash_mla import flash_mla_sparse_fwd

BF16 = torch.bfloat16


def test_results_never_require_grad() -> None:
    q = torch.ones(2, 2, 512, dtype=BF16, requires_grad=True)
    kv = torch.ones(4, 512, dtype=BF16, requires_grad=True)
    weight = torch.nn.Parameter(torch.ones(1, 8, 1024, dtype=BF16))
    indices = torch.zeros(2, 2, dtype=torch.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, max_logits, lse = mlacast.sparse_mla_prefill(q, kv, indices, sm_scale=1.0)
        quantized, _, _ = mlacast.sparse_mla_prefill(
            q, kv, indices, sm_scale=1.0, out_format=mlacast.Mxfp8()
        )
        assert isinstance(out, torch.Tensor)
        assert isinstance(quantized, mlacast.QuantizedTensor)
        projected = mlacast.grouped_out_project(quantized, weight)
        shim = flash_mla_sparse_fwd(q, kv[:, None], indices[:, None], 1.0)
    for result in (out, max_logits, lse, quantized.data, projected, *shim):
        assert not result.requires_grad
