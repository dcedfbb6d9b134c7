// Tiles of what GGUF's types hold beside the others': 5- and 6-bit codes, and codes that count from a minimum.
#include "tiles.h"

namespace hfa {

TileFns int6_tiles(bool wide) { return grid_tiles<6, kCentred>(wide); }
TileFns int5_tiles(bool wide) { return grid_tiles<5, kCentred>(wide); }
TileFns minimum_tiles(int bits, bool wide) {
    switch (bits) {
        case 5: return grid_tiles<5, kMinimums>(wide);
        case 4: return grid_tiles<4, kMinimums>(wide);
        default: return grid_tiles<2, kMinimums>(wide);
    }
}

}  // namespace hfa
