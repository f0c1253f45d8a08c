"""Faults put into the PTX of kernels, each of which the emulator must find."""
