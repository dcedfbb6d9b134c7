"""Kernels of hfaccel: packed layouts, PyTorch references, C++ for CPUs, Triton for GPUs; no transformers."""

# name -> "module:function" of each op's public function: one line an op, imported when it is used.
OPS = {
    "qlinear": "hfaccel_kernels.qlinear:qlinear",
    "plain_linear": "hfaccel_kernels.qlinear:plain_linear",
    "cache_write": "hfaccel_kernels.pages:cache_write",
    "paged_attention": "hfaccel_kernels.paged:paged_attention",
    "lora_add": "hfaccel_kernels.lora:lora_add",
}
