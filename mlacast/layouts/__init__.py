"""Where bytes go: scale-factor layouts, element orders and pages of a KV cache.

Every layout has its map as a formula (``*_offset`` or ``*_position``), a ``to_`` and a ``from_``.
"""

from __future__ import annotations

from mlacast.layouts.element_order import (
    chunk16_position,
    chunk32_position,
    from_chunk16,
    from_chunk32,
    from_chunk32_sf,
    to_chunk16,
    to_chunk32,
    to_chunk32_sf,
)
from mlacast.layouts.paging import PageLayout, read_records, record_planes, write_records
from mlacast.layouts.sf_mn_major import (
    allocate_mn_major,
    allocate_mn_major_padded,
    from_mn_major,
    mn_major_offset,
    mn_major_strides,
    to_mn_major,
)
from mlacast.layouts.sf_row_major import (
    allocate_row_major,
    from_row_major,
    row_major_offset,
    row_major_strides,
    to_row_major,
)
from mlacast.layouts.sf_swizzled_128x4 import (
    from_swizzled_128x4,
    gather_swizzled,
    scatter_swizzled,
    swizzled_offset,
    swizzled_shape,
    to_swizzled_128x4,
)

__all__ = [
    "PageLayout",
    "allocate_mn_major",
    "allocate_mn_major_padded",
    "allocate_row_major",
    "chunk16_position",
    "chunk32_position",
    "from_chunk16",
    "from_chunk32",
    "from_chunk32_sf",
    "from_mn_major",
    "from_row_major",
    "from_swizzled_128x4",
    "gather_swizzled",
    "mn_major_offset",
    "mn_major_strides",
    "read_records",
    "record_planes",
    "row_major_offset",
    "row_major_strides",
    "scatter_swizzled",
    "swizzled_offset",
    "swizzled_shape",
    "to_chunk16",
    "to_chunk32",
    "to_chunk32_sf",
    "to_mn_major",
    "to_row_major",
    "to_swizzled_128x4",
    "write_records",
]
