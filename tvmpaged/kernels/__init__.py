"""The kernels, written once in TVM TensorIR: what is computed, not how it is laid out."""
