"""llama.cpp's own quantizer: `python quantize_llama.py SPEC-AS-JSON`, in the peer's environment.

The spec: "source" and "target" files, "kind" ("Q4_K_M"), "threads", and for importance "weights": a file of
fp32 numbers, and "index": tensor's name in the file -> [first number, count].
"""

import ctypes
import json
import sys


def main() -> None:
    import numpy
    from llama_cpp import llama_cpp as library

    spec = json.loads(sys.argv[1])
    settings = library.llama_model_quantize_default_params()
    settings.ftype = getattr(library, f"LLAMA_FTYPE_MOSTLY_{spec['kind']}")
    settings.nthread = spec["threads"]
    if "weights" in spec:
        numbers = numpy.fromfile(spec["weights"], dtype=numpy.float32)
        entries = (library.llama_model_imatrix_data * (len(spec["index"]) + 1))()  # the last one ends it
        for entry, (name, (first, count)) in zip(entries, spec["index"].items(), strict=False):
            part = numbers[first : first + count]
            entry.name, entry.size = name.encode(), count
            entry.data = part.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        settings.imatrix = ctypes.cast(entries, ctypes.POINTER(library.llama_model_imatrix_data))
    status = library.llama_model_quantize(
        spec["source"].encode(), spec["target"].encode(), ctypes.byref(settings)
    )
    sys.exit(status)


if __name__ == "__main__":
    main()
