"""laconic: larger language models on fewer GPUs and slower networks, by saying it in fewer bytes."""

__version__ = "0.1.0"
