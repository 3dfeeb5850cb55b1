"""One step of an MLA layer: decodes, a continued prompt and a new one, cast to FP8 on the way.

Every row of the output, whichever kernel is last for it, lands in one buffer, with the scales that
DeepGEMM reads. Run it: python examples/mixed_step.py
"""

import torch

import mlacast
from mlacast.layers import MLAAttention, MLAMetadata

HEADS, PAGE, PAGES = 4, 16, 8
QUERY_LENS, CONTEXT_LENS = [1, 1, 6, 9], [40, 3, 50, 0]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

weight = torch.randn(HEADS * 256, 512, dtype=torch.bfloat16, device=device) / 512**0.5
layer = MLAAttention(HEADS, scale=192**-0.5, kv_b_proj=weight, context_workspace_tokens=32)

# The pages of each request, and a cache that holds everything, the new tokens included.
table = torch.arange(4 * PAGES, dtype=torch.int32, device=device).view(4, PAGES)
cache = mlacast.KvFormat.BF16.allocate(4 * PAGES, PAGE, d_qk=576, device=device)
new = []
for request, (fresh, cached) in enumerate(zip(QUERY_LENS, CONTEXT_LENS, strict=True)):
    latents = torch.randn(cached + fresh, 576, dtype=torch.bfloat16, device=device)
    positions = torch.arange(cached + fresh, device=device)
    slots = table[request, positions // PAGE] * PAGE + positions % PAGE
    mlacast.kv_cache_append(latents, slots, cache, mlacast.KvFormat.BF16)
    new.append(latents[cached:])
latent, k_pe = torch.cat(new).split([512, 64], dim=1)
q = torch.randn(sum(QUERY_LENS), HEADS, 192, dtype=torch.bfloat16, device=device)

# Requests of up to decode_threshold new tokens come first; all layers of a step share this.
metadata = MLAMetadata.build(QUERY_LENS, CONTEXT_LENS, table, PAGE)

fmt = mlacast.Fp8Group(128, "float32", "mn_major")
out = mlacast.QuantizedTensor.empty(len(q), 1, HEADS * 128, fmt, device)
layer(q, latent, k_pe.unsqueeze(1), cache, metadata, out)

exact = torch.empty(len(q), HEADS * 128, dtype=torch.bfloat16, device=device)
layer(q, latent, k_pe.unsqueeze(1), cache, metadata, exact)
error = (out.dequantize().flatten(1) - exact.float()).norm() / exact.float().norm()
print(
    f"{len(q)} tokens, {metadata.num_decode_tokens} of them decoded; error of the cast {error:.1%}"
)
assert error < 0.05
