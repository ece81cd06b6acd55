"""Kernels: one folder each, with ``reference.py`` (torch: the meaning) and ``triton.py`` (the speed).

This room knows torch and Triton only, and what reads the files of tuned plans.

Words that all of them share. A *route* is one entry of ``topk_ids``, numbered row * k + column. A *slot* is a place in the order in which
tiles of rows are multiplied: sorted by expert, each expert's slots padded to whole blocks of ``block_m``.
"""
