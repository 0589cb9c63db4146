"""The parts of a decoder layer, one plain function or module each.

Every function here is exact PyTorch and runs on any device; the ones with a Triton twin
(``rms_norm``, ``fused_add_rms_norm``, ``silu_mul``, ``rope_and_cache``) are the only seams.
"""
