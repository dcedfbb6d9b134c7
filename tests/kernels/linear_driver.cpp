// Runs hfa_linear on cases read from a file: for instruction sets that this process cannot load (test_neon.py).
//   case:  15 int64 (kind, n, k, ld, bits, group, chunk, act_bits, scale_dtype, bias_dtype, x_dtype, y_dtype, m,
//          y bytes, 0), then five arrays (data, scale, zero, bias, x), each an int64 length in bytes and its bytes;
//          length 0 is NULL
//   output: the y of each case
#include <stdio.h>
#include <stdlib.h>

#include "hfa.h"

static void* array(FILE* in) {
    int64_t bytes = 0;
    if (fread(&bytes, 8, 1, in) != 1) exit(2);
    if (bytes == 0) return nullptr;
    void* to = aligned_alloc(64, (bytes + 64) / 64 * 64);
    if (fread(to, 1, bytes, in) != (size_t)bytes) exit(2);
    return to;
}

int main(int, char** names) {
    FILE* in = fopen(names[1], "rb");
    FILE* out = fopen(names[2], "wb");
    if (!in || !out) return 2;
    int64_t f[15];
    while (fread(f, 8, 15, in) == 15) {
        HfaWeight w{};
        w.data = array(in);
        w.scale = array(in);
        w.zero = static_cast<const uint8_t*>(array(in));
        w.bias = array(in);
        void* x = array(in);
        w.kind = f[0], w.n = f[1], w.k = f[2], w.ld = f[3], w.bits = f[4], w.group = f[5], w.chunk = f[6];
        w.act_bits = f[7], w.scale_dtype = f[8], w.bias_dtype = f[9];
        void* y = calloc(1, f[13] + 64);
        if (hfa_linear(&w, x, f[10], w.k, f[12], y, f[11], w.n, 1)) return 3;
        fwrite(y, 1, f[13], out);
    }
    return fclose(out);
}
