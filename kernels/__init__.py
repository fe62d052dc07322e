"""Operations of the Inkling model: one file each, with the formula, a row-invariant reference for the CPU and, on
CUDA, a Triton-language kernel.

    rows                products whose bits do not depend on the other rows; the row quantum
    norm                rms_norm, embed + norm, the two norms of a draft input
    short_conv          causal 4-tap convolution over paged inputs
    attention_inputs    q, k, v, relative bias from the fused product, with their cache writes
    relative_attention  attention over pages with a bias by distance
    mlp                 gated MLP, router, routed and shared experts
    head                logits of the rows that draw
    sampling            filters, noise, argmax

Row-invariance: the bits of a row's result do not depend on how many rows, or which, were computed with it. CPU
tensors take the reference; CUDA tensors take the kernel (not written yet: NotImplementedError says so).
"""
