"""Data: files, tokenizers, token files on disk, the order of samples."""
