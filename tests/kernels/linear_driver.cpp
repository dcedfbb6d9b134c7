// Runs hfa_linear on cases read from a file: for instruction sets that this process cannot load (test_neon.py).
//   case:  an HfaWeight with pointers of no meaning, three int64 (dtype of x and y, m, y bytes), then five arrays
//          (data, scale, zero, bias, x), each an int64 length in bytes and its bytes; length 0 is NULL
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
    HfaWeight w;
    int64_t f[3];
    while (fread(&w, sizeof w, 1, in) == 1 && fread(f, 8, 3, in) == 3) {
        w.data = array(in);
        w.scale = array(in);
        w.zero = static_cast<const uint8_t*>(array(in));
        w.bias = array(in);
        void* x = array(in);
        void* y = calloc(1, f[2] + 64);
        if (hfa_linear(&w, x, f[0], w.k, f[1], y, f[0], w.n, 1)) return 3;
        fwrite(y, 1, f[2], out);
    }
    return fclose(out);
}
