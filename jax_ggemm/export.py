"""What `jax.export` has to be told about this package's custom call."""

from __future__ import annotations

from jax.export import DisabledSafetyCheck

from jax_ggemm.native import TARGET

export_checks = (DisabledSafetyCheck.custom_call(TARGET),)
"""For `jax.export.export(f, disabled_checks=jax_ggemm.export_checks)`.

JAX refuses to export custom calls that it does not know, since it cannot promise that they stay compatible. A
program exported with this one runs where this version of jax_ggemm, or a later one, is installed and its
`ragged_dot` has been called or `jax_ggemm.register()` was.
"""
