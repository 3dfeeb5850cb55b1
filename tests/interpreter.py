"""Let Triton's interpreter do once what it does again for every operation; results are the same.

Most of an interpreted kernel's time goes into objects that say what an array's shape is and into
looking through the whole language at every call of a device function. What is replaced belongs to
Triton 3.6: another version runs as it is, which takes longer.
"""

from __future__ import annotations

import inspect
from typing import Any

import triton

_KNOWN_TRITON = "3.6."


class _Nothing:
    """What is restored after a call that replaced nothing."""

    def restore(self) -> None:
        """Restore nothing."""


def _patch_language_once(interpreter: Any, language: Any) -> None:
    """Look for what is to be replaced in the language once a kernel, not at every device function.

    A kernel's scope is restored after it. That of a device function is dropped by its caller, and
    finds nothing left unless it sees a module that the kernel does not.
    """
    plain = interpreter._patch_lang
    seen_by: dict[int, frozenset[str]] = {}
    patched: set[str] = set()

    def patch(function: Any) -> Any:
        names = function.__globals__
        seen = seen_by.get(id(names))
        if seen is None:
            modules = [value for value in names.values() if inspect.ismodule(value)]
            languages = [module for module in modules if module in (language, language.core)]
            seen = seen_by[id(names)] = frozenset(module.__name__ for module in languages)
        if seen and seen <= patched:
            return _Nothing()
        scope = plain(function)
        patched.update(seen)
        restore = scope.restore

        def restore_all() -> None:
            restore()
            patched.clear()

        scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch


def _share_shapes(core: Any, semantic: Any) -> None:
    """Make one object of each shape, and broadcast nothing to the shape it has.

    Nothing changes a shape.
    """
    plain_broadcast = semantic.broadcast_impl_value
    plain_type, plain_tensor = core.block_type.__init__, core.tensor.__init__
    # What types have, by sizes: shape, number of elements, name of the shape; last the shape and
    # the number of elements of tensors.
    known: dict[tuple[int, ...], tuple[Any, int, str, tuple[Any, Any]]] = {}
    of_scalars = core.tuple([]), core.constexpr(1)

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if type(size) is core.constexpr else size for size in shape)
        if not all(type(size) is int for size in sizes):
            plain_type(self, element_ty, shape)
            return
        if sizes not in known:
            plain_type(self, element_ty, shape)
            of_tensors = core.tuple([core.constexpr(size) for size in sizes])
            shared = of_tensors, core.constexpr(self.numel)
            known[sizes] = self.shape, self.numel, str(self.shape), shared
        self.element_ty = element_ty
        self.shape, self.numel, text, self._of_tensors = known[sizes]
        self.name = f"<{text}, {element_ty}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        shared = getattr(type, "_of_tensors", None) if type.is_block() else of_scalars
        if shared is None:
            plain_tensor(self, handle, type)
            return
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.shape, self.numel = shared

    def broadcast(self: Any, one: Any, other: Any) -> Any:
        shape = one.shape
        # Of scalars, too.
        return (one, other) if shape is other.shape else plain_broadcast(self, one, other)

    core.block_type.__init__ = init_type
    core.tensor.__init__ = init_tensor
    semantic.broadcast_impl_value = broadcast


def _remember_dtypes(interpreter: Any) -> None:
    """Remember NumPy's type of a type; those of one name are equal."""
    plain = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def get(type: Any) -> Any:
        found = known.get(type.name)
        if found is None:
            found = known[type.name] = plain(type)
        return found

    interpreter._get_np_dtype = get


def hurries() -> bool:
    """Whether this Triton is one whose parts can be replaced."""
    return bool(triton.__version__.startswith(_KNOWN_TRITON))


def hurry() -> None:
    """Replace parts of the interpreter in this process."""
    from triton import language
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    _patch_language_once(interpreter, language)
    _share_shapes(language.core, TritonSemantic)
    _remember_dtypes(interpreter)
