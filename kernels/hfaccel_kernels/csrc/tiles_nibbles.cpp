// Tiles of 4-bit codes.
#include "tiles.h"

namespace hfa {

TileFns int4_tiles(bool asym, bool wide) { return integer_tiles<4>(asym, wide); }
TileFns nf4_tiles(bool wide) { return grid_tiles<kNf4, kCentred>(wide); }

}  // namespace hfa
