"""After warm-up no change of sizes, lengths or alignment compiles anything.

BC-49, vllm-project/vllm-ascend#14324: 1 to 64 tokens, up to 40 pages, lists of 16 to 64 and others,
indices sliced at any offset.

Instead of compiling, a new variant raises here, with the arguments that made it new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import mlacast
from mlacast.ops.decode_metadata import decode_metadata as plan_parts
from tests.gpu import steps
from tests.gpu.steps import CUDA, Step, decode_step, prefill_step

pytest.importorskip("triton", reason="the portable kernels need triton")

from triton.runtime.jit import JITFunction  # noqa: E402

from mlacast.kernels.common import combine_splits  # noqa: E402
from mlacast.kernels.gluon.sm90.sparse_mla_decode_few_kernel import (  # noqa: E402
    sparse_mla_decode_few_kernel,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_fp8_kernel import (  # noqa: E402
    sparse_mla_decode_fp8_kernel,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_kernel import (  # noqa: E402
    sparse_mla_decode_kernel,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_merge import merge_splits_kernel  # noqa: E402
from mlacast.kernels.gluon.sm90.sparse_mla_prefill import sparse_mla_prefill_kernel  # noqa: E402
from mlacast.kernels.triton import (  # noqa: E402
    decode_metadata,
    dense_mla_decode,
    sparse_mla_decode,
    sparse_mla_prefill,
)
from mlacast.ops import known_calls  # noqa: E402

KERNELS = (
    sparse_mla_prefill._sparse_mla_prefill_kernel,
    sparse_mla_decode._sparse_mla_decode_kernel,
    combine_splits.combine_splits_kernel,
    dense_mla_decode._dense_mla_decode_kernel,
    decode_metadata._decode_metadata_kernel,
    sparse_mla_prefill_kernel,
    sparse_mla_decode_kernel,
    sparse_mla_decode_few_kernel,
    sparse_mla_decode_fp8_kernel,
    merge_splits_kernel,
)


pytestmark = pytest.mark.usefixtures("each_backend")


class NewVariantError(Exception):
    """A call wanted to compile."""


class Watch:
    """Record the variants that are compiled, and from ``close`` on refuse new ones."""

    def __init__(self) -> None:
        self.closed = False
        self.known: dict[str, dict[str, str]] = {}

    def see(self, function: Any, signature: Any, constants: Any, attributes: Any) -> None:
        """Called in place of a compilation."""
        names = function.arg_names
        traits = {name: str(kind) for name, kind in signature.items()}
        for path, properties in (attributes or {}).items():
            if properties:
                traits[names[path[0]]] += " divisible by 16"
        for path, value in (constants or {}).items():
            if traits.get(names[path[0]]) == "constexpr":
                traits[names[path[0]]] = f"constant {value}"
        previous = self.known.get(function.__name__)
        if self.closed:
            changed = {
                name: f"{(previous or {}).get(name)} -> {trait}"
                for name, trait in traits.items()
                if (previous or {}).get(name) != trait
            }
            raise NewVariantError(f"{function.__name__}: {changed}")
        self.known[function.__name__] = traits


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """A watch on every compilation of this process."""
    observer = Watch()
    # Variants of earlier tests must not hide what this one would compile.
    for kernel in KERNELS:
        kernel.device_caches.clear()
    known_calls.OPERATORS.clear()
    known_calls.PUBLIC.clear()
    compile_now = JITFunction._do_compile

    def observed(
        self: Any,
        key: Any,
        signature: Any,
        device: Any,
        constexprs: Any,
        options: Any,
        attrs: Any,
        warmup: Any,
    ) -> Any:
        observer.see(self, signature, constexprs, attrs)
        return compile_now(self, key, signature, device, constexprs, options, attrs, warmup)

    monkeypatch.setattr(JITFunction, "_do_compile", observed)
    yield observer


# Odd, so that no size that grows with the tokens is a multiple of 16 by way of the heads.
HEADS = 5
FORMAT = mlacast.Mxfp8("chunk32")


def _shift_indices(step: Step, by: int) -> Step:
    """The same indices and lengths at another alignment."""
    rows, topk = step.indices.shape
    wide = torch.empty(rows, topk + 8, dtype=torch.int32, device=CUDA)
    view = wide[:, by : by + topk]
    view.copy_(step.indices)
    lengths = torch.empty(rows + 8, dtype=torch.int32, device=CUDA)[by : by + rows]
    lengths.copy_(step.lengths)
    step.indices, step.lengths = view, lengths
    return step


def _more_pages(step: Step, pages: int) -> Step:
    """A cache of another number of pages (or kv of another number of rows)."""
    step.pool = torch.cat([step.pool] * 20)[:pages]
    return step


def _changed_calls(make: Callable[..., Step], change: str) -> Iterator[tuple[Step, dict[str, Any]]]:
    """Calls that differ from the warm-up in one respect, and where they write."""
    fresh = {"out_format": FORMAT}
    if change == "tokens":
        yield from ((make(tokens, heads=HEADS), fresh) for tokens in range(1, 65))
    elif change == "topk":
        yield from (
            (make(16, heads=HEADS, topk=k), fresh) for k in (1, 16, 17, 32, 33, 48, 64, 151)
        )
    elif change == "pages":
        for pages in (1, *range(3, 41)):
            yield _more_pages(make(16, heads=HEADS), pages), fresh
    elif change == "alignment of indices":
        for by in (0, 1, 2, 3):
            yield _shift_indices(make(16, heads=HEADS), by), fresh
    elif change == "rows of a longer call":
        whole = make(24, heads=HEADS)
        yield from ((whole.rows(first, first + 16), fresh) for first in (0, 1, 2, 3))
    else:
        buffer = mlacast.QuantizedTensor.empty(21, 1, HEADS * 512, FORMAT, CUDA)
        for first in (0, 1, 2, 5):
            yield make(16, heads=HEADS), {"out": buffer[first : first + 16]}


@pytest.mark.parametrize(
    "change",
    ["tokens", "topk", "pages", "alignment of indices", "rows of a longer call", "row of a buffer"],
)
@pytest.mark.parametrize(
    ("make", "num_splits"), [(prefill_step, None), (decode_step, 1), (decode_step, 3)]
)
def test_nothing_compiles_after_warm_up(
    make: Callable[..., Step], change: str, num_splits: int | None, watch: Watch
) -> None:
    more: dict[str, Any] = {} if num_splits is None else {"num_splits": num_splits}
    for tokens in (1, 16):
        make(tokens, heads=HEADS).run(out_format=FORMAT, **more)
    watch.closed = True
    problems = []
    for number, (step, where) in enumerate(_changed_calls(make, change)):
        try:
            step.run(**where, **more)
        except NewVariantError as error:
            problems.append(f"call {number}: {error}")
    assert not problems, "\n".join(problems)


def _codes_call(
    tokens: int, num_splits: int, *, first: int = 0, pages: int = 40, topk: int = 151, gap: int = 0
) -> None:
    """A sparse decode of codes, whose lists start anywhere and whose rows have gaps."""
    wide = torch.randn(tokens, HEADS, 576 + gap, device=CUDA).to(torch.float8_e4m3fn)
    indices = torch.randint(0, pages, (tokens + first, topk + 3), dtype=torch.int32, device=CUDA)
    lengths = torch.full((tokens + first,), topk, dtype=torch.int32, device=CUDA)
    mlacast.sparse_mla_decode(
        wide[..., :576],
        torch.zeros(pages, 64, 576, dtype=torch.uint8, device=CUDA),
        indices[first:, first : first + topk],
        kv_format=mlacast.KvFormat.FP8,
        sm_scale=0.05,
        topk_length=lengths[first:],
        num_splits=num_splits,
        backend=steps.BACKEND,
    )


@pytest.mark.parametrize("num_splits", [1, 3])
def test_decode_of_codes_compiles_nothing_after_warm_up(num_splits: int, watch: Watch) -> None:
    """Tokens, pages, lists and where they start, gaps between rows."""
    for tokens in (1, 16):
        _codes_call(tokens, num_splits)
    watch.closed = True
    for tokens in (2, 3, 15, 17, 64):
        _codes_call(tokens, num_splits)
    for first in (1, 2, 3):
        _codes_call(16, num_splits, first=first)
    for pages in (1, 3, 33):
        _codes_call(16, num_splits, pages=pages)
    for topk in (1, 16, 64, 65):
        _codes_call(16, num_splits, topk=topk)
    _codes_call(16, num_splits, gap=16)


def _dense_call(requests: int, first: int = 0, pages: int = 40, width: int = 10) -> None:
    """A dense decode of some requests, whose tables and lengths start anywhere."""
    q = torch.randn(requests, 1, HEADS, 576, device=CUDA).to(torch.float8_e4m3fn)
    cache = torch.zeros(pages, 64, 576, dtype=torch.uint8, device=CUDA).view(torch.float8_e4m3fn)
    table = torch.randint(0, pages, (requests + first, width + 2), dtype=torch.int32, device=CUDA)
    lengths = torch.full((requests + first,), 64 * width, dtype=torch.int32, device=CUDA)
    mlacast.dense_mla_decode(
        q,
        cache,
        table[first:, :width],
        lengths[first:],
        kv_format=mlacast.KvFormat.FP8,
        sm_scale=0.05,
        backend="triton",
    )


def test_dense_decode_compiles_nothing_after_warm_up(watch: Watch) -> None:
    """Requests, pages, widths of tables and where they start; with and without splits."""
    for requests in (1, 16, 300):
        _dense_call(requests)
    _dense_call(300, width=1)
    watch.closed = True
    for requests in (1, 3, 15, 17, 64, 299):
        _dense_call(requests)
    for first in (1, 2, 3):
        _dense_call(4, first)
    for pages in (1, 3, 33):
        _dense_call(2, pages=pages)
    for width in (1, 2, 3, 9, 70):
        _dense_call(4, width=width)


def test_metadata_compiles_nothing_after_warm_up(watch: Watch) -> None:
    """Requests, parts, bounds and where the lengths start, each size of a program seen once."""
    lengths = torch.randint(0, 3000, (8192,), dtype=torch.int32, device=CUDA)

    def call(batch: int, first: int = 0, parts: int = 132, topk: int | None = 2048) -> None:
        some = lengths[first : first + batch]
        plan_parts(some, num_parts=parts, topk=topk, backend="triton")

    for batch in (16, 100, 2000):
        call(batch)
        call(batch, topk=None)
    watch.closed = True
    for batch in (1, 2, 15, 64, 65, 1024, 1025, 8192):
        call(batch)
    for first in (1, 2, 3):
        call(16, first)
    for parts in (1, 2, 16, 131):
        call(16, parts=parts)
    for topk in (0, 1, 16, 64, None):
        call(16, topk=topk)
