"""Small PTX programs whose results were recorded on a GPU, for the emulator to be held to."""
