"""Kernels of hfaccel: packed layouts, plain PyTorch references, C++ for CPUs, Triton for GPUs. No transformers here."""

# name -> "module:function": the public function of each op. One line an op; a module is imported when it is used.
OPS = {
    "qlinear": "hfaccel_kernels.qlinear:qlinear",
    "plain_linear": "hfaccel_kernels.qlinear:plain_linear",
}
