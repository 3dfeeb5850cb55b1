"""Outputs that share memory with inputs or with themselves are refused before any write.

Source: deepseek-ai/TileKernels#15, sgl-project/sglang#36237 (caller-provided buffers).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mlacast
from tests.ops.rejections import (
    Arguments,
    good_decode,
    good_dense,
    good_dense_prefill,
    good_prefill,
    good_v_up,
)

BF16 = torch.bfloat16


def call(out: torch.Tensor, q: torch.Tensor) -> None:
    kv = torch.ones(4, 512, dtype=BF16)
    indices = torch.zeros(q.shape[0], 2, dtype=torch.int32)
    mlacast.sparse_mla_prefill(q, kv, indices, sm_scale=1.0, out=out)


def test_an_output_over_its_query_is_refused_and_nothing_is_written() -> None:
    storage = torch.full((3, 2, 512), 7.0, dtype=BF16)
    with pytest.raises(ValueError, match=r"^sparse_mla_prefill: out must not share memory with q,"):
        call(storage[1:], storage[:2])
    assert bool((storage == 7.0).all())


def test_an_output_beside_its_query_in_one_wider_buffer_is_served() -> None:
    """Rows interleave, bytes do not: two column ranges of one buffer."""
    wide = torch.zeros(3, 4, 512, dtype=BF16)
    wide[:, :2] = 1.0
    call(wide[:, 2:], wide[:, :2])
    assert bool((wide == 1.0).all())


def test_codes_and_scales_that_share_memory_are_refused() -> None:
    raw = torch.zeros(4096, dtype=torch.uint8)
    data = raw.view(torch.float8_e4m3fn)[:2048].view(2, 1, 1024)
    sf = raw.view(torch.int32)[:16].as_strided((2, 1, 8), (1, 16, 2))
    out = mlacast.QuantizedTensor(data, sf, mlacast.Mxfp8())
    q = torch.ones(2, 2, 512, dtype=BF16)
    indices = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^sparse_mla_prefill: out must not share .* out.sf,"):
        mlacast.sparse_mla_prefill(q, q[:, 0], indices, sm_scale=1.0, out=out)
    assert not bool(raw.any())


def test_columns_of_every_head_are_told_apart() -> None:
    """Query and output share each head's row of a wider buffer, but no byte."""
    wide = torch.zeros(3, 4, 1024, dtype=BF16)
    wide[:, :, 512:] = 1.0
    call(wide[:, :, :512], wide[:, :, 512:])
    assert bool((wide == 1.0).all())
    with pytest.raises(ValueError, match="must not share memory with q"):
        call(wide[:, :, 256:768], wide[:, :, 512:])


GOOD: dict[str, Callable[[], Arguments]] = {
    "sparse_mla_prefill": good_prefill,
    "sparse_mla_decode": good_decode,
    "dense_mla_decode": good_dense,
    "dense_mla_prefill": good_dense_prefill,
    "v_up_project": good_v_up,
}


def _inside(memory: Tensor, like: Tensor) -> Tensor:
    """A tensor of the shape and dtype of ``like`` at the start of ``memory``, bytes."""
    flat = memory.view(like.dtype)
    return flat.as_strided(like.shape, like.stride())


def _inputs(arguments: Arguments) -> list[str]:
    tensors = [name for name, value in arguments.items() if isinstance(value, Tensor)]
    rope = ["rope.cos_sin_cache", "rope.positions"] if arguments.get("rope") else []
    return [name for name in tensors if name != "out"] + rope


@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op, good in GOOD.items() for name in _inputs(good())]
)
def test_no_input_may_lie_in_the_output(op: str, name: str) -> None:
    """Every tensor argument in turn starts where the output does."""
    arguments = GOOD[op]()
    memory = torch.full((1 << 20,), 0x5A, dtype=torch.uint8)
    arguments["out"] = _inside(memory, arguments["out"])
    if name.startswith("rope."):
        rope = arguments["rope"]
        parts = {"cos_sin_cache": rope.cos_sin_cache, "positions": rope.positions}
        part = name.removeprefix("rope.")
        parts[part] = _inside(memory, parts[part])
        arguments["rope"] = mlacast.Rope(**parts, pairing=rope.pairing)
    else:
        arguments[name] = _inside(memory, arguments[name])
    with pytest.raises(ValueError, match=rf"^{op}: out must not share memory with {name},"):
        getattr(mlacast, op)(**arguments)
    assert bool((memory == 0x5A).all())
