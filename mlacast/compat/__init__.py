"""Drop-in modules: the signatures of other libraries over the core ops.

Each module renames arguments and converts conventions (base and empty value of the lse, orders,
formats); none of them does maths. ``docs/conventions.md`` lists every convention that they convert.
Import the one you need, for example ``from mlacast.compat import flash_mla``.
"""
