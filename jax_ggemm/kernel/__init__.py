"""GPU kernels. `config` is plain Python; the other modules import the CuTe DSL, and only run to compile an object."""
