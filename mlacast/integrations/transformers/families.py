"""The models that ``fuse`` knows, and what is particular to each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlacast.descriptors.out_format import Fp8Group, Mxfp8, OutFormat
from mlacast.integrations.transformers.forward import FusedForward
from mlacast.integrations.transformers.mla_forward import FusedMlaForward
from mlacast.integrations.transformers.modeling import check_transformers, load_modeling
from mlacast.integrations.transformers.module_forward import ModuleForward

_MLA_GEOMETRY = {
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
}


@dataclass(frozen=True)
class Family:
    """A model architecture.

    Attributes:
        folder: Name of its folder in transformers.
        prefix: How the names of its classes begin.
        forward: What takes the place of the forward of its attention.
        geometry: Fields of its config with the only value that is built.
        default_format: Format of the attention output if the caller names none.
    """

    folder: str
    prefix: str
    forward: type[ModuleForward]
    geometry: Mapping[str, int]
    default_format: OutFormat

    @property
    def class_names(self) -> tuple[str, str]:
        """Its two classes that ``fuse`` takes."""
        return f"{self.prefix}ForCausalLM", f"{self.prefix}Model"

    def attention_modules(self, model: Any) -> list[Any]:
        """Return the attention modules of a model, in order."""
        attention = getattr(load_modeling(self.folder), f"{self.prefix}Attention")
        return [module for module in model.modules() if isinstance(module, attention)]


FAMILIES = (
    # One scale for each 128 features is what the models' own FP8 linear layers take.
    Family("deepseek_v3", "DeepseekV3", FusedMlaForward, _MLA_GEOMETRY, Fp8Group(128)),
    Family("deepseek_v32", "DeepseekV32", FusedMlaForward, _MLA_GEOMETRY, Fp8Group(128)),
    Family(
        "deepseek_v4",
        "DeepseekV4",
        FusedForward,
        {"head_dim": 512, "qk_rope_head_dim": 64, "num_key_value_heads": 1},
        Mxfp8(),
    ),
)


def family_of(op: str, model: object) -> Family:
    """Return what a model is of.

    Raises:
        ImportError: transformers is missing or not the one mlacast was written for.
        TypeError: The model is of none.
    """
    check_transformers()
    ancestors = {ancestor.__name__ for ancestor in type(model).__mro__}
    for family in FAMILIES:
        # Names first: only the modelling code of the model itself has to be there.
        for name in ancestors.intersection(family.class_names):
            if isinstance(model, getattr(load_modeling(family.folder), name)):
                return family
    known = ", ".join(name for family in FAMILIES for name in family.class_names)
    raise TypeError(
        f"{op}: model must be one of {known} of transformers, got {type(model).__name__}"
    )
